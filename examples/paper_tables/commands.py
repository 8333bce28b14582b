"""The commands that measure a cell of a paper: programs of this project."""

import shlex

LAUNCHER = "torchrun"
ATTENTION = "benchmarks/attention_time.py"
TRAINING = "pretrain_gpt.py"
INFERENCE = "benchmarks/inference.py"


def _launched(ranks: int, per_node: int, program: str, words: list[str]) -> str:
    nodes, each = max(1, ranks // per_node), min(ranks, per_node)
    return shlex.join([LAUNCHER, "--nnodes", str(nodes), "--nproc-per-node", str(each), program, *words])


def attention_command(
    ranks: int,
    strategy: str,
    seq_length: int,
    heads: int = 32,
    kv_heads: int = 32,
    head_dim: int = 128,
    causal: bool = True,
    per_node: int = 8,
) -> str:
    """Times one attention, forward and backward, in bf16.

    Args:
        ranks: of the context group.
        strategy: a spec, such as "loongtrain:head_parallel_size=4,inner_ring_size=2".
        seq_length: tokens of the sequence; the other sizes are those of the model.
        causal: the mask; False: every token sees every token.
        per_node: ranks of a node.
    """
    words = ["--strategy", strategy, "--seq-length", str(seq_length), "--num-attention-heads", str(heads)]
    words += ["--num-query-groups", str(kv_heads), "--kv-channels", str(head_dim), "--dtype", "bf16"]
    return _launched(ranks, per_node, ATTENTION, words if causal else [*words, "--full-mask"])


def training_command(ranks: int, flags: str, per_node: int = 8) -> str:
    """Trains on `ranks` ranks with the flags of pretrain_gpt.py: a model, its sizes, parallelism and recomputation."""
    return _launched(ranks, per_node, TRAINING, shlex.split(flags))


def inference_command(flags: str) -> str:
    """Times passes over a cache on one machine; the program starts its own ranks."""
    return shlex.join(["python", INFERENCE, *shlex.split(flags)])
