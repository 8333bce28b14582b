"""A tiny training run for the tests: arguments, synthetic batches with an uneven loss mask, and a way to train."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.context_parallel.patches.cpu_host import support_cpu_host
from megatron.context_parallel.strategies import choose_by_layer
from megatron.context_parallel.trainer import setup, training
from megatron.context_parallel.trainer.checkpoint.save_load import Save
from megatron.context_parallel.trainer.checkpoint.train_state import Progress, TrainState
from megatron.context_parallel.trainer.config.flags import FLAGS
from megatron.context_parallel.trainer.data.batches import collate, document_options
from tests.support.case_args import CaseArgs
from tests.support.device import HEAD_DIM

support_cpu_host()

SEQUENCE, VOCABULARY, BATCH = 32, 64, 4

FAMILIES = {
    "llama": {
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "group_query_attention": True,
        "num_query_groups": 2,
        "untie_embeddings_and_output_weights": True,
    },
    "gpt3": {
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "group_query_attention": False,
        "num_query_groups": 4,
        "untie_embeddings_and_output_weights": False,
    },
}
FAMILIES["sinks"] = FAMILIES["llama"] | {"softmax_type": "learnable"}


def case_args(family: str, **changes) -> CaseArgs:
    """Arguments of a tiny run, as `parse_args` derives them, on the world this rank is in."""
    values = {
        **{name: flag.default for name, flag in FLAGS.items() if flag.decides in ("weights", "model")},
        **{"num_experts": None, "expert_model_parallel_size": 1, "moe_router_topk": 2, "moe_ffn_hidden_size": None},
        **FAMILIES[family],
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 4,
            "kv_channels": HEAD_DIM,
        },
        **{"seq_length": SEQUENCE, "max_position_embeddings": SEQUENCE},
        **{"check_for_nan_in_loss_and_grad": True, "check_for_spiky_loss": False, "rerun_mode": "disabled"},
        **{"loss_scale": None, "vocabulary": VOCABULARY, "padded_vocab_size": VOCABULARY},
        **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "init_method_std": 0.1, "params_dtype": torch.float32},
        **{
            "bf16": False,
            "fp16": False,
            "sequence_parallel": False,
            "cp_strategy": "ring",
            "transformer_impl": "local",
            "fp8": None,
            "cp_layout": "zigzag",
            "cp_attention_backend": "auto",
            "reset_attention_mask": False,
            "cp_place_documents": False,
            "cp_cluster": None,
            "cp_measured": None,
            "recompute_modules": None,
            "dry_run": False,
            "recompute_whitelist": [],
            "offload_checkpoints": False,
            "offload_kept": False,
            "fine_grained_activation_offloading": False,
            "offload_modules": None,
            "min_offloaded_tensor_size": 2**20,
            "mlp_chunks_for_training": 1,
            "cross_entropy_chunk_size": BATCH * SEQUENCE,
            "eod_token": 0,
        },
        **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1},
        **{"virtual_pipeline_model_parallel_size": None, "distributed_timeout_minutes": 1, "seed": 1234},
        **{"micro_batch_size": 2, "global_batch_size": BATCH, "train_iters": 20, "eval_iters": 0, "eval_interval": 10},
        **{"lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "cosine", "lr_decay_iters": 20, "lr_warmup_iters": 2},
        **{"rampup_batch_size": None, "train_samples": None, "lr_decay_samples": None, "lr_warmup_samples": 0},
        **{"decoupled_lr": None, "decoupled_min_lr": None, "skip_train": False, "bias_gelu_fusion": True},
        **{"lr_warmup_fraction": None, "weight_decay": 0.01, "clip_grad": 1.0},
        **{"use_distributed_optimizer": True, "overlap_grad_reduce": False, "overlap_param_gather": False},
        **{"optimizer_cpu_offload": False, "use_precision_aware_optimizer": False},
        **{"optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": False},
        **{"num_distributed_optimizer_instances": 1, "use_megatron_fsdp": False, "use_torch_fsdp2": False},
        **{"nccl_communicator_config_path": None, "high_priority_stream_groups": None},
        **{"data_parallel_sharding_strategy": "no_shard"},
        **{"save": None, "load": None, "save_interval": None, "finetune": False, "exit_on_missing_checkpoint": False},
        **{"save_on_error": "stop"},
        **{"no_save_optim": False, "no_save_rng": False, "no_load_optim": False, "no_load_rng": False},
        **{"async_save": False, "keep_last": None, "save_retain_interval": None, "ckpt_step": None},
        **{"load_fallback": False, "no_verify_checkpoint": False, "override_data_order": False},
        **{"profile": False, "tensorboard_dir": None},
        **{"exit_interval": None, "exit_duration_in_mins": None, "exit_signal_handler": False, "log_interval": 1},
        **changes,
    }
    options = values.pop("cp_options", {})
    options["layout"] = values["cp_layout"]
    values["cp_layers"] = choose_by_layer(values["cp_strategy"], values["num_layers"], **options)
    args = CaseArgs(**values, world_size=dist.get_world_size(), rank=dist.get_rank())
    parts = args.tensor_model_parallel_size * args.context_parallel_size * args.pipeline_model_parallel_size
    args.data_parallel_size = args.world_size // parts
    return args


def batches(args: CaseArgs, consumed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Random tokens, the first of each pair predictable, and a loss mask that leaves 0 to 90% of a sequence."""
    rank, size = parallel_state.get_data_parallel_rank(), args.data_parallel_size
    for start in range(consumed + rank * args.micro_batch_size, 10**6, size * args.micro_batch_size):
        samples = [sample(number) for number in range(start, start + args.micro_batch_size)]
        yield collate(samples, **document_options(args))


def sample(number: int) -> dict[str, torch.Tensor]:
    """Sample `number` of the synthetic data."""
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(VOCABULARY, (SEQUENCE + 1,), generator=generator)
    text[1::2] = (text[:-1:2] * 5 + 3) % VOCABULARY
    share = 0.9 * torch.rand(1, generator=generator)
    mask = (torch.rand(SEQUENCE, generator=generator) < share).float()
    mask[: SEQUENCE // 4] *= number % 2  # every other sequence has none in its first quarter
    return {"tokens": text[:-1], "labels": text[1:], "loss_mask": mask, "position_ids": torch.arange(SEQUENCE)}


class Recorder:
    """Stands in for RunLog: keeps every loss."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.flops: list[float] = []
        self.evaluations: list[float] = []

    def iteration_done(self, progress, loss, lr, grad_norm, flops, seconds) -> None:
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        self.flops.append(flops)

    def evaluation_done(self, iteration, split, loss) -> None:
        self.evaluations.append(loss)

    def say(self, line) -> None: ...


def train(family: str, **changes) -> Recorder:
    """Build the model, load what `load` names, train to the end, take the groups down again."""
    args = case_args(family, **changes)
    if args.save:  # which the lock on it makes otherwise
        Path(args.save).mkdir(parents=True, exist_ok=True)
    with groups(args):
        state = build(args)
        recorder = Recorder()
        data = [batches(args, state.progress.consumed_train_samples) for _ in state.model]
        valid = [batches(args, 1000 + state.progress.consumed_valid_samples) for _ in state.model]
        training.train_loop(args, state, recorder, data, valid if args.eval_iters else None, time.monotonic())
        forget_graphs(state.model)
        return recorder


def forget_graphs(model: list[torch.nn.Module]) -> None:
    """Experts keep tensors of their last step, whose graph would keep the model, its groups and their threads."""
    for module in (module for chunk in model for module in chunk.modules()):
        for owner in (module, getattr(module, "token_dispatcher", None)):
            for name, value in vars(owner).items() if owner else ():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    setattr(owner, name, None)


def save_initial(family: str, directory: str, changes: dict) -> None:
    """Save freshly initialised weights, from which runs in any parallel layout can start alike."""
    args = case_args(family, save=directory, **changes)
    with groups(args):
        Save(args, build(args)).finish()


@contextmanager
def groups(args: CaseArgs) -> Iterator[None]:
    """The parallel groups of `args` in the world this rank is in."""
    setup.initialize_model_parallel(args)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def build(args: CaseArgs) -> TrainState:
    """`training.build_state` without what it prints."""
    with mock.patch("builtins.print"):
        return training.build_state(args, Progress())
