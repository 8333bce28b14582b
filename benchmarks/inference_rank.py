"""The code of each rank of inference.py: a model over a cache that already holds tokens, timed pass by pass."""

from functools import partial
from itertools import product

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from benchmarks.job import run_job
from benchmarks.rounds import interleave
from benchmarks.stopwatch import Stopwatch
from megatron.context_parallel import ContextParallel
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.integration.rope import use_layout
from megatron.context_parallel.integration.spec import block_spec
from megatron.context_parallel.patches.cpu_host import support_cpu_host

VOCABULARY = 128


def build(job: dict) -> Session:
    """A session over a model of the job's sizes with random weights and random cached keys and values."""
    support_cpu_host()
    n = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=n)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=job["num_layers"],
        hidden_size=job["hidden_size"],
        ffn_hidden_size=2 * job["hidden_size"],
        num_attention_heads=job["num_attention_heads"],
        num_query_groups=job["num_query_groups"],
        kv_channels=job["kv_channels"],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        bias_dropout_fusion=False,
        transformer_impl="local",
        context_parallel_size=n,
    )
    cp = ContextParallel("ring", group=parallel_state.get_context_parallel_group())
    model = GPTModel(config, block_spec(config, cp, config.num_layers), VOCABULARY, 1, position_embedding_type="rope")
    use_layout(model, cp)
    tokens = 2 * max(job["batch_size"]) * (max(job["context"]) + 64 * n)
    cluster = load_cluster(job["cluster"]) if job["cluster"] else None
    session = Session(model.eval(), cp, cache_tokens=tokens, cluster=cluster)
    for pages in (x for layer in session.cache.layers for x in layer):
        pages.normal_()
    return session


def measure(job: dict) -> list[dict]:
    """Rounds of each context, batch size, miss rate and choice, and of a decode step; collective over the world.

    Returns an entry for each: `context`, `batch`, `miss_rate`, `new` and `cached` tokens of a sequence, `choice`, the
    `variant` that it took, and `rounds` as `rounds.interleave` fills them.
    """
    session, watch, entries = build(job), Stopwatch(), list[dict]()
    watch.watch_waits()
    for context, batch in product(job["context"], job["batch_size"]):
        cases = [(max(1, round(context * rate)), rate, job["choices"]) for rate in job["miss_rates"]]
        for new, rate, choices in [*cases, (1, None, ["decode"])]:
            of = dict(context=context, batch=batch, miss_rate=rate, new=new, cached=context - new)
            runs = [of | {"choice": choice, "rounds": []} for choice in choices]
            before = [session.open() for _ in range(batch)]
            if of["cached"]:
                session.tables.add(dict.fromkeys(before, of["cached"]))
            timed = [(entry, partial(turn, session, entry, before)) for entry in runs]
            interleave(timed, job["rounds"], job["warm_up"], watch)
            entries += runs
            for sequence in before:
                session.free(sequence)
    parallel_state.destroy_model_parallel()
    return entries


def turn(session: Session, entry: dict, before: list[int]) -> None:
    """Runs one turn of each conversation, and frees it."""
    turns = [session.fork(sequence, entry["cached"]) for sequence in before]
    choice = None if entry["choice"] == "decode" else entry["choice"]
    session.forward({sequence: [7] * entry["new"] for sequence in turns}, choice)
    entry["variant"] = session.variant
    for sequence in turns:
        session.free(sequence)


if __name__ == "__main__":
    run_job(measure)
