"""How a model is trained: the sizes and flags of a run that decide its time and memory."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.tokens.rank_grid import RankGrid

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
IMPLEMENTATIONS = ("cpu", "fused", "transformer_engine")
SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FULL_RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
FULL_RECOMPUTE_FLAGS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LOGITS_AT_ONCE = 2**26  # bytes of float32
LEAST_LOSS_CHUNK = 512  # tokens; every chunk adds to the gradient of the whole output layer
ORDER = ("tensor", "context", "data", "pipeline")  # of ranks, innermost first


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run of the trainer. The fields have the names and meanings of its flags, or of Megatron's.

    Attributes:
        cp_strategy: spec of the attention, with layout and head-parallel size.
        data_parallel_sharding_strategy: what is sharded over the data and context ranks. "optim" is
            `--use-distributed-optimizer` (ZeRO 1), "optim_grads" ZeRO 2, "optim_grads_params" ZeRO 3 or FSDP.
        num_distributed_optimizer_instances: copies of the sharded state.
        use_torch_fsdp2: sharded weights are float32, and the optimizer has no copy of them.
        optimizer_cpu_offload: the optimizer of `optimizer_offload_fraction` of the parameters is in host memory; with
            FSDP2 also the shards of weights and gradients.
        recompute_modules: the parts of layers that selective recomputation computes again; none: core attention.
        recompute_whitelist: the modules whose outputs full recomputation keeps.
        offload_checkpoints, offload_kept: the inputs of recomputed layers and those outputs are in host memory.
        offload_modules: the parts of layers whose saved tensors are in host memory, of at least
            `min_offloaded_tensor_size` numbers each.
        mlp_chunks_for_training: parts of the tokens that an MLP computes in turn, and again in the backward pass; None:
            those of `mlp_chunks`.
        cross_entropy_chunk_size: tokens whose logits exist at once; None: those of a micro batch.
        dtype: of weights and activations: "bf16", "fp16" or "fp32".
        fp8: format of the inputs of a layer's products ("e4m3" or "hybrid"); None: as `dtype`.
        moe_token_dispatcher_type: how tokens are sent to their experts, as the flag.
        tp_comm_overlap: tensor-parallel gathers and sums, but for the last part of a sum, run beside the product that
            they belong to (user buffers of Transformer Engine). The trainer does not do this.
        grad_reduce_in_bf16: gradients are added and sent in bf16; the trainer does both in float32.
        fp8_param_gather: weights are gathered in 8 bits; the trainer gathers them in `dtype`.
        gradient_accumulation_fusion: products of weight gradients add to the gradients. In the trainer a kernel of its
            own does.
        partial_dtype: of partial outputs and gradients between context ranks. The trainer sends float32.
        implementation: of the layers: megatron-core's own, on a "cpu" or "fused" on a GPU, or "transformer_engine".

    Raises:
        UsageError: sizes that do not fit each other, or an unknown value.
    """

    seq_length: int
    micro_batch_size: int = 1
    global_batch_size: int = 1
    cp_strategy: str = "ring"
    context_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    data_parallel_size: int = 1
    sequence_parallel: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    num_distributed_optimizer_instances: int = 1
    use_torch_fsdp2: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    tp_comm_overlap: bool = False
    grad_reduce_in_bf16: bool = False
    fp8_param_gather: bool = False
    gradient_accumulation_fusion: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()
    recompute_whitelist: tuple[str, ...] = ()
    offload_checkpoints: bool = False
    offload_kept: bool = False
    offload_modules: tuple[str, ...] = ()
    min_offloaded_tensor_size: int = 2**20
    mlp_chunks_for_training: int | None = None
    cross_entropy_chunk_size: int | None = None
    dtype: str = "bf16"
    fp8: str | None = None
    moe_token_dispatcher_type: str = "allgather"
    partial_dtype: str = "fp32"
    implementation: str = "fused"

    def __post_init__(self) -> None:
        for name, known in (
            ("dtype", ITEMSIZE),
            ("partial_dtype", ITEMSIZE),
            ("implementation", IMPLEMENTATIONS),
            ("data_parallel_sharding_strategy", SHARDING),
        ):
            if (value := getattr(self, name)) not in known:
                raise UsageError(f"{name} {value}: unknown; give one of {', '.join(known)}")
        each = self.micro_batch_size * self.data_parallel_size
        if self.global_batch_size % each:
            good = -(-self.global_batch_size // each) * each
            raise UsageError(
                f"--global-batch-size {self.global_batch_size}: not a multiple of --micro-batch-size "
                f"{self.micro_batch_size} x {self.data_parallel_size} data-parallel ranks; give {good}"
            )
        if self.seq_length % self.context_parallel_size:
            good = -(-self.seq_length // self.context_parallel_size) * self.context_parallel_size
            raise UsageError(
                f"--seq-length {self.seq_length}: not a multiple of --context-parallel-size "
                f"{self.context_parallel_size}; give {good}"
            )
        if self.sharers % (instances := self.num_distributed_optimizer_instances):
            raise UsageError(
                f"--num-distributed-optimizer-instances {instances}: does not divide the {self.sharers} data x context "
                "ranks; give 1"
            )
        if self.recompute_granularity == "full" and not (self.recompute_method and self.recompute_num_layers):
            raise UsageError("--recompute-granularity full: needs --recompute-method and --recompute-num-layers")

    @cached_property
    def mesh(self) -> RankGrid:
        """All ranks, in Megatron's order tp-cp-dp-pp."""
        sizes = (
            self.tensor_model_parallel_size,
            self.context_parallel_size,
            self.data_parallel_size,
            self.pipeline_model_parallel_size,
        )
        return RankGrid(ORDER, sizes)

    @property
    def world_size(self) -> int:
        return self.mesh.size

    @property
    def itemsize(self) -> int:
        """Bytes of a weight or an activation."""
        return ITEMSIZE[self.dtype]

    @property
    def grad_itemsize(self) -> int:
        """Bytes of a gradient that is added to others, or sent."""
        return 2 if self.grad_reduce_in_bf16 else 4

    @property
    def gathered_itemsize(self) -> int:
        """Bytes of a weight that is gathered."""
        return 1 if self.fp8_param_gather else self.itemsize

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a micro batch."""
        return self.micro_batch_size * self.seq_length // self.context_parallel_size

    @property
    def tokens_of_loss(self) -> int:
        """Tokens of a rank whose logits exist at once."""
        return min(self.tokens, self.cross_entropy_chunk_size or self.tokens)

    @property
    def micro_batches(self) -> int:
        """Micro batches of a rank in an iteration."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def sharers(self) -> int:
        """Ranks that have the same weights: data and context ranks."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def computed_again(self) -> tuple[str, ...]:
        """The parts of layers that selective recomputation computes again, by the names of `--recompute-modules`."""
        return (self.recompute_modules or ("core_attn",)) if self.recompute_granularity == "selective" else ()

    @property
    def optimizer_on_host(self) -> float:
        """The share of the parameters whose optimizer is in host memory."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    @property
    def shards_on_host(self) -> bool:
        """Whether FSDP2 keeps its shards of weights and gradients in host memory, beside the optimizer."""
        return self.use_torch_fsdp2 and self.optimizer_cpu_offload

    @property
    def fits_fsdp2(self) -> bool:
        """Whether FSDP2 can train it. The trainer's `check_sharding.py` refuses what any FSDP cannot, flag by flag."""
        return self.pipeline_model_parallel_size == 1 and self.dtype != "fp16" and self.fp8 is None

    @property
    def fits_megatron_fsdp(self) -> bool:
        """The same of Megatron-FSDP, which has no tensor-parallel ranks either."""
        return self.fits_fsdp2 and self.tensor_model_parallel_size == 1

    @property
    def on_cpu(self) -> bool:
        """Whether ranks compute on CPUs and communicate over gloo."""
        return self.implementation == "cpu"

    @property
    def virtual_stages(self) -> int:
        """Parts that an interleaved pipeline splits a stage into."""
        return self.virtual_pipeline_model_parallel_size or 1

    def shards(self, what: str) -> int:
        """The number of ranks that "optim", "grads" or "params" are sharded over."""
        shared = what in self.data_parallel_sharding_strategy.split("_")
        return self.sharers // self.num_distributed_optimizer_instances if shared else 1

    def groups(self, *names: str) -> list[tuple[int, ...]]:
        """The groups of ranks that differ only in the dimensions `names` of `ORDER`."""
        return [*_groups(self.mesh, names)]


def sharding_flags(sharding: str, fsdp2: bool = False) -> str:
    """The trainer's flags for a value of `data_parallel_sharding_strategy`; none for "no_shard"."""
    if fsdp2:
        return "--use-torch-fsdp2"
    if sharding in SHARDING[2:]:
        return f"--use-megatron-fsdp --data-parallel-sharding-strategy {sharding}"
    return "--use-distributed-optimizer" if sharding == "optim" else ""


def loss_chunk(columns: int) -> int:
    """The default of `--cross-entropy-chunk-size`, where a rank has `columns` logits of a token."""
    return max(LEAST_LOSS_CHUNK, LOGITS_AT_ONCE // (4 * columns))


@cache
def _groups(mesh: RankGrid, names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    groups = []
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        if not any(coordinates[name] for name in names):  # the first of its group
            groups.append(mesh.along(rank, *names))
    return tuple(groups)
