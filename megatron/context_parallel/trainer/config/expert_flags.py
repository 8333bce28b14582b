"""The flags of experts: several MLPs in each layer, a few of which process each token."""

from functools import partial

from megatron.context_parallel.cli.flag import FlagSection, flag

BALANCING = ("aux_loss", "seq_aux_loss", "none")
DISPATCHERS = ("allgather", "alltoall")
weights = partial(flag, decides="weights", needs="num_experts")
model = partial(flag, decides="model", needs="num_experts")


class Experts(FlagSection, title="experts"):
    """mixtures of experts"""

    num_experts: int | None = flag("number of experts (MLPs) in each layer", decides="weights", example=8)
    expert_model_parallel_size: int = flag(
        "number of ranks that the experts are sharded over", 1, example=2, needs="num_experts", divides="num_experts"
    )
    moe_ffn_hidden_size: int | None = weights("width of an expert", derived="ffn-hidden-size", example=1024)
    moe_shared_expert_intermediate_size: int | None = weights("width of an MLP for every token", example=1024)
    moe_router_topk: int = model("number of experts for each token", 2, not_above="num_experts")
    moe_router_pre_softmax: bool = model("apply the softmax to all experts, before the top k are selected", False)
    moe_router_load_balancing_type: str = model(
        "load balancing loss over the tokens of a micro batch, or of each sequence", "aux_loss", choices=BALANCING
    )
    moe_aux_loss_coeff: float = model("weight of the load balancing loss", 0.0, at_least=0, example=0.01)
    moe_token_dispatcher_type: str = flag(
        "how tokens are sent to their experts", "allgather", choices=DISPATCHERS, needs="num_experts"
    )
