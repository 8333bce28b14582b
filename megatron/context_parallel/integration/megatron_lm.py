"""Runs an unmodified checkout of Megatron-LM with our attention.

    cd Megatron-LM
    torchrun --nproc-per-node 8 -m megatron.context_parallel.integration.megatron_lm pretrain_gpt.py \\
        --context-parallel-size 8 --cp-strategy mesh [Megatron's flags]

`--cp-strategy` takes a spec, such as mesh:grid=2x4,layout=cyclic, or one for each layer. Megatron's `--cp-comm-type`
also selects strategies. The only other flag of ours is `--cp-attention-backend`. The checkout's own `megatron.core` is
used. Names in it are replaced before the script imports them by value.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.names import BACKENDS
from megatron.context_parallel.patches.megatron_lm import put_in_place, replaced_by
from megatron.context_parallel.strategies import check_same_tokens, choose_by_layer, distinct, specs_given

from .groups import context_of

# Required flags of Megatron, and why. Missing ones are added.
NEEDED = {
    "--no-create-attention-mask-in-dataloader": "the strategy applies the mask",
    "--calculate-per-token-loss": "ranks differ in the number of tokens with a loss",
    "--attention-dropout 0.0": "context-parallel attention has no dropout",
}
_WEIGHED = "over n context ranks megatron-core gives it 1/n of its weight; use this project's trainer"
_OURS = "the strategy computes attention; give --cp-attention-backend"
_OWN_ATTENTION = "its layers keep their own attention"
_PACKED = ("--sft", "--dataloader-inter-document-masking")  # batches are packed sequences (thd)
_REFUSED = {
    "--moe-aux-loss-coeff": _WEIGHED,
    "--moe-z-loss-coeff": _WEIGHED,
    "--mtp-num-layers": "it shards sequences itself",
    "--hybrid-context-parallel": "it shards sequences itself",
    "--max-seqlen-per-dp-cp-rank": "it shards sequences itself",
    "--experimental-attention-variant": _OWN_ATTENTION,
    "--spec": _OWN_ATTENTION,
    "--hybrid-layer-pattern": _OWN_ATTENTION,
    "--hybrid-override-pattern": _OWN_ATTENTION,
    "--heterogeneous-layers-config-path": _OWN_ATTENTION,
    "--heterogeneous-layers-config-encoded-json": _OWN_ATTENTION,
    "--attention-backend": _OURS,
    "--flash-attention-version": _OURS,
}


def main(argv: list[str] | None = None) -> None:
    """Runs Megatron's script with our attention: SCRIPT [flags].

    Raises:
        UsageError: no script, an invalid flag of ours, or a flag of Megatron that is not supported.
    """
    script, *flags = (sys.argv[1:] if argv is None else argv) or [""]
    if not os.path.isfile(script):
        raise UsageError(f"script {script}: no such file; give a script of Megatron-LM, such as pretrain_gpt.py")
    strategies, backend, theirs = split_flags(flags)
    theirs, added = complete(theirs)
    if added and os.environ.get("RANK", "0") == "0":
        print(f"cp: added {' '.join(added)}", flush=True)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    put_in_place(replacements(strategies, backend, packed=any(flag in theirs for flag in _PACKED)))
    sys.argv = [script, *theirs]
    runpy.run_path(script, run_name="__main__")


def split_flags(flags: list[str]) -> tuple[list[str], str, list[str]]:
    """The strategy of all layers or of each, `--cp-attention-backend`, and Megatron's own flags.

    Raises:
        UsageError: an unknown strategy, option or backend, or strategies that do not fit the layers or each other.
    """
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument("--num-layers", type=int, default=1)
    shared.add_argument("--context-parallel-size", type=int, default=1)
    sizes = shared.parse_known_args(flags)[0]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cp-strategy")
    parser.add_argument("--cp-attention-backend", default="auto")
    parser.add_argument("--cp-comm-type", nargs="+")
    parser.add_argument("--hierarchical-context-parallel-sizes", nargs="+", type=int)
    ours, theirs = parser.parse_known_args(flags)
    if ours.cp_attention_backend not in BACKENDS:
        raise UsageError(f"--cp-attention-backend {ours.cp_attention_backend}: unknown; choose {' or '.join(BACKENDS)}")
    layers, n = sizes.num_layers, sizes.context_parallel_size
    specs = specs_given(ours.cp_strategy, ours.cp_comm_type, ours.hierarchical_context_parallel_sizes, n, layers)
    choices = choose_by_layer(specs, layers, n)
    check_same_tokens(choices, n)
    per_layer = choices if len(distinct(choices)) > 1 else choices[:1]
    return [choice.spec for choice in per_layer], ours.cp_attention_backend, theirs


def complete(flags: list[str]) -> tuple[list[str], list[str]]:
    """Megatron's flags with the required ones, and the flags that were added.

    Raises:
        UsageError: flags that are not supported, alone or together, or another value of a required one.
    """
    words = [part for flag in flags for part in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    for flag, why in _REFUSED.items():
        if flag in words:
            raise UsageError(f"{flag}: not supported, {why}; leave it out")
    if "--overlap-moe-expert-parallel-comm" in words and any(flag in words for flag in _PACKED):
        raise UsageError("--overlap-moe-expert-parallel-comm: it drops packed sequences (thd); leave it out")
    added = []
    for needed, why in NEEDED.items():
        name, _, value = needed.partition(" ")
        if name not in words:
            added.append(needed)
        elif value and float(words[words.index(name) + 1]) != float(value):
            raise UsageError(f"{name} {words[words.index(name) + 1]}: {why}; give {needed}")
    return [*flags, *(part for needed in added for part in needed.split())], added


def replacements(
    strategies: Sequence[str], backend: str = "auto", packed: bool = False
) -> Iterator[tuple[Any, str, Callable]]:
    """(owner, name, value) of every replacement in megatron-core. Apply them with `setattr` before importing Megatron.

    Our attention replaces that of megatron-core's and Transformer Engine's specs. Batches and rotary embeddings are
    sharded by the layout of the strategies; there is one strategy, or one for each layer. With `packed`, a call of the
    model without packed sequences raises UsageError.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer import ModuleSpec

    from .megatron_lm_batch import Batches, refuse_hybrid
    from .spec import ContextParallelAttention

    def context() -> ContextParallel:
        return context_of(parallel_state.get_context_parallel_group(), strategies[0])

    def core_attention(self: object) -> ModuleSpec:
        group = parallel_state.get_context_parallel_group()
        layers = [context_of(group, strategy) for strategy in strategies]
        params = {"cp": layers if len(layers) > 1 else layers[0], "backend": backend, "follows_layout": None}
        return ModuleSpec(ContextParallelAttention, params=params)

    def embedding_here(pos_emb: Tensor, seq_dim: int, cp_group: object = None) -> Tensor:
        return context().shard(pos_emb, dim=seq_dim)

    batches = Batches(context, packed)
    return replaced_by(
        core_attention=core_attention,
        batch=batches.shard,
        packed_batch=batches.shard_packed,
        hybrid_batch=refuse_hybrid,
        embedding=embedding_here,
        call=batches.call,
    )


if __name__ == "__main__":
    from megatron.context_parallel.cli.run_main import run_main

    run_main(main)
