"""The arguments of a model for generation, from its run or its HuggingFace folder."""

from pathlib import Path
from typing import Any

from megatron.context_parallel.cli.run_main import announce
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.integration.huggingface.config import is_huggingface, model_flags
from megatron.context_parallel.trainer.arguments.check_values import ranks_in
from megatron.context_parallel.trainer.arguments.complete import complete
from megatron.context_parallel.trainer.checkpoint.saved_flags import saved_flags
from megatron.context_parallel.trainer.config.flags import Arguments, Flags

from .flags import Source


def model_arguments(source: Source) -> Arguments:
    """The arguments of a model for the started ranks. Ranks that tensor parallelism does not use are context ranks.

    Raises:
        UsageError: there is no model, or it does not fit these ranks.
    """
    ranks = ranks_in("WORLD_SIZE", 1)
    tensor = source.tensor_model_parallel_size
    if ranks % tensor:
        raise UsageError(f"--tensor-model-parallel-size {tensor}: does not divide the {ranks} ranks started; give 1")
    wanted: dict[str, Any] = {name: getattr(source, name) for name in ("load", "ckpt_step", "load_fallback")}
    foreign = is_huggingface(source.load)
    given = model_flags(Path(source.load)) if foreign else saved_flags(Flags(**wanted), "bf16", "fp16")
    if given.get("num_experts") and tensor > 1:
        raise UsageError(f"--tensor-model-parallel-size {tensor}: --load {source.load} has experts; give 1")
    if source.bf16:
        given |= {"bf16": True, "fp16": False}
    context = ranks // tensor
    parallel = {"tensor_model_parallel_size": tensor, "context_parallel_size": context, "cp_layout": "contiguous"}
    # A session shards its tokens itself: the training sequence length is only set to the minimum.
    training = {"micro_batch_size": 1, "seq_length": context, "train_iters": 1, "lr": 1.0, "transformer_impl": "local"}
    given |= {**parallel, **training, **wanted}
    announce(f"reading {source.load}")  # tokenizers take seconds to import
    return complete(Flags(**given), (given["vocab_size"], None) if foreign else None)[0]
