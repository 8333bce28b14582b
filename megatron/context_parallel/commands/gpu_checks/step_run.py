"""The process of a training step: it trains, and writes rows of what was measured and predicted to a file.

Its words are the file, the most tokens of a sequence, and the trainer's flags without `--seq-length`.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator

import torch

from megatron.context_parallel.cli.run_main import ignore_warnings_of_libraries
from megatron.context_parallel.cluster.description import Cluster, for_tensors, load_cluster
from megatron.context_parallel.cluster.measure.probe import probe
from megatron.context_parallel.cluster.step.fit import bytes_needed
from megatron.context_parallel.cluster.step.step_time import forecast_step
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.checkpoint.train_state import Progress
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.config.workload import model_of, run_of
from megatron.context_parallel.trainer.data.batches import build_data_iterator, build_datasets
from megatron.context_parallel.trainer.data.tokenizer import build_tokenizer
from megatron.context_parallel.trainer.setup import distributed_job
from megatron.context_parallel.trainer.training import build_state, samples_needed, train_step

GIB = 2**30
MOST = 1.01  # of the predicted memory: the dry run counts neither workspaces of cuBLAS nor roundings of the allocator


def main() -> None:
    ignore_warnings_of_libraries()
    path, most, *flags = sys.argv[1:]
    args = longest_that_fits(flags, int(most))
    with distributed_job(args), open(path, "w") as file:
        for row in measured(args):
            print(json.dumps({"tokens": args.seq_length, **row}), file=file, flush=True)


def longest_that_fits(flags: list[str], most: int) -> Arguments:
    """The run with `most` tokens or, until it fits the GPU by the dry run, with half as many. Any fits a CPU."""
    on_gpu = torch.cuda.is_available()
    room = for_tensors(torch.cuda.get_device_properties(0).total_memory / GIB) if on_gpu else float("inf")
    tokens = most
    while tokens > 1:
        args = parse_args([*flags, "--seq-length", str(tokens)])
        if bytes_needed(model_of(args), run_of(args)) <= room:
            return args
        tokens //= 2
    raise UsageError("the model's weights do not fit this GPU; take a larger one")


def measured(args: Arguments) -> Iterator[dict]:
    """The rows of memory, if on a GPU, and of times with a data sheet's rates and with those of this device."""
    seconds, peak = train(args)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        expected = bytes_needed(model_of(args), run_of(args))
        verdict = "PASS" if peak <= MOST * expected else "FAIL"
        yield compared("GiB at the peak", "dry run", peak / GIB, expected / GIB) | {"verdict": verdict}
    sheet = load_cluster("dgx-h200" if on_gpu and "H200" in torch.cuda.get_device_name() else "dgx-h100")
    yield from of_time(args, seconds, sheet, sheet.name, sheet.device.peak_TFLOP_s)
    gc.collect()
    torch.cuda.empty_cache()
    model = model_of(args)
    own = probe(
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        dtype=args.params_dtype,
        heads=model.num_attention_heads,
        kv_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        quick=True,
    )
    yield from of_time(args, seconds, own, "rates measured now", sheet.device.peak_TFLOP_s)


def train(args: Arguments) -> tuple[float, int]:
    """The median seconds of an iteration but the first, and the allocator's most bytes."""
    state = build_state(args, Progress())
    dataset, *_ = build_datasets(args, build_tokenizer(args), samples_needed(args))
    assert dataset is not None
    batches = [build_data_iterator(dataset, args, 0, 0, 1, print)]
    times = []
    for _ in range(args.train_iters):
        begun = time.monotonic()
        train_step(args, state, batches, begun)
        times.append(time.monotonic() - begun)
    return statistics.median(times[1:]), torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def of_time(args: Arguments, seconds: float, cluster: Cluster, source: str, peak: float) -> Iterator[dict]:
    """The rows of an iteration that takes so many seconds; `peak`: TFLOP/s of which the MFU is a part."""
    model = model_of(args)
    expected = forecast_step(model, run_of(args), cluster).seconds
    tokens = args.seq_length * args.global_batch_size
    flops = model.flops_per_sequence(args.seq_length) * args.global_batch_size
    yield compared("ms of an iteration", source, 1000 * seconds, 1000 * expected)
    for what, amount in (("tokens/s", tokens), (f"MFU of {peak:g} TFLOP/s", flops / peak / 1e12)):
        yield compared(what, source, amount / seconds, amount / expected)


def compared(what: str, source: str, measured: float, predicted: float) -> dict:
    """A row; its verdict is empty, as that of a time, which has no target."""
    numbers = {"measured": measured, "predicted": predicted, "ratio": measured / predicted}
    return {"what": what, "predicted from": source, **numbers, "verdict": ""}
