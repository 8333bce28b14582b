"""Trainings and texts in a process with a pretended CUDA device: the numbers of a CPU, and no wait that is not needed.

    python -m tests.campaigns.pretended_cuda [NAME ...]

Every case runs on ranks of a process with a GPU (`tests/support/pretended_cuda.py`) and of one without. Losses,
gradient norms, evaluations and tokens must be the same, and no streams may race. From the second step on, the host may
wait for the GPU as often as the case says. The exit status is 1 if a case fails.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.inference.sampling_params import SamplingParams

from megatron.context_parallel.inference.engine import Engine
from megatron.context_parallel.inference.request import Request
from megatron.context_parallel.inference.rules import NO_RULES, Rules
from megatron.context_parallel.inference.tokenizer import ByteTokenizer
from megatron.context_parallel.trainer import training
from tests.support import session_case, training_case
from tests.support.ranks import Ranks

ROOT = str(Path(__file__).parents[2])
RANKS, STEPS, DECODED = 4, 3, 6
# Tokens of each chunk (megatron-core), losses with norms of each weight, mean loss, norm (megatron-core).
WAITS_OF_STEP = 4


class Case(NamedTuple):
    """A training, or texts of an engine.

    Attributes:
        ranks: their number; changes: of the arguments, or of the session; waits: of a step, at most.
        bound: of differences: absolute of losses, relative of norms.
        params: of sampling, for texts; rules: of each text.
    """

    ranks: int
    changes: dict[str, Any]
    waits: int = WAITS_OF_STEP
    bound: float = 1e-5
    params: dict[str, Any] | None = None
    rules: Rules = NO_RULES


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
FP16 = {"fp16": True, "params_dtype": torch.float16, "initial_loss_scale": 64.0}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 32}
DOCUMENTS = {"reset_attention_mask": True}
PLACED = DOCUMENTS | {"context_parallel_size": 2, "cp_place_documents": True}
FSDP2 = {"use_torch_fsdp2": True, "use_distributed_optimizer": False}
MEGATRON_FSDP = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_n_logprobs": 3}
RULES = Rules(min_tokens=5, logit_bias=[(3, 1.0)], presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.2)
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
INTERLEAVED = {
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "num_layers": 4,
    "global_batch_size": 8,
}
SAVED = {"save": "FOLDER", "save_interval": 2}
CASES = {
    "llama": Case(1, SAVED | {"eval_iters": 1, "eval_interval": 2}),
    "gpt3": Case(1, {"family": "gpt3"}, bound=1e-3),  # on a GPU its fused GELU has the tanh form
    "sinks": Case(2, {"family": "sinks", "context_parallel_size": 2, "cp_strategy": "ulysses"}),
    "bf16": Case(1, BF16, bound=1e-2),
    "fp16": Case(2, FP16 | SAVED | {"context_parallel_size": 2}, waits=WAITS_OF_STEP + 1, bound=1e-2),
    "documents": Case(4, DOCUMENTS | {"context_parallel_size": 4, "cp_strategy": "mesh"}),
    "placed documents": Case(2, PLACED, waits=WAITS_OF_STEP + 2),  # 1 for each micro batch: placements are compared
    "data and context": Case(4, {"context_parallel_size": 2, "cp_strategy": "allgather", **FULL}),
    "tensor": Case(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline": Case(2, {"pipeline_model_parallel_size": 2}),
    "experts": Case(2, EXPERTS | {"expert_model_parallel_size": 2}, waits=WAITS_OF_STEP + 7),  # 3 a layer, 1 for tokens
    "offloaded": Case(1, FULL | {"offload_checkpoints": True, "offload_kept": True, "recompute_whitelist": ["qkv"]}),
    "chunks": Case(1, {"cross_entropy_chunk_size": 16, "mlp_chunks_for_training": 2}),
    "fsdp2": Case(2, FSDP2),
    "fsdp2 on the host": Case(2, FSDP2 | {"optimizer_cpu_offload": True}, waits=WAITS_OF_STEP + 3),
    "megatron fsdp": Case(2, MEGATRON_FSDP),
    "ring": Case(4, {"context_parallel_size": 4, "num_layers": 3}),
    "rounds": Case(2, {"context_parallel_size": 2, "cp_strategy": "ulysses", "cp_options": {"head_rounds": 2}}),
    "two dimensions": Case(4, {"context_parallel_size": 4, "cp_strategy": "attention2d", **FULL}),
    "overlapped": Case(2, OVERLAPPED | {"num_layers": 4}),
    "overlapped with context": Case(4, OVERLAPPED | {"context_parallel_size": 2, "cp_strategy": "mesh"}),
    "interleaved stages": Case(2, INTERLEAVED, waits=WAITS_OF_STEP + 1),
    "interleaved and overlapped": Case(4, INTERLEAVED | OVERLAPPED, waits=WAITS_OF_STEP + 1),
    "interleaved and offloaded": Case(2, INTERLEAVED | FULL | {"offload_checkpoints": True}, waits=WAITS_OF_STEP + 1),
    "instances": Case(4, OVERLAPPED | {"num_distributed_optimizer_instances": 2, "global_batch_size": 8}),
    "saved meanwhile": Case(2, SAVED | {"async_save": True}),
    "greedy": Case(1, {}, 1, params={"temperature": 0.0}),
    "int8": Case(2, {"kv_cache_dtype": "int8", "frozen": True}, 2, params={"temperature": 0.0}),
    "sampled": Case(1, {"frozen": True}, 1, params=SAMPLED, rules=RULES),
}


# ------------------------------------------------------------------------------------------------ on the ranks


def _project_line() -> str:
    """The line of the project that runs now, and that of a library below it."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    frames = [frame for frame in frames if not frame.filename.endswith("/warnings.py")]
    ours = [frame for frame in frames if frame.filename.startswith(f"{ROOT}/megatron")]
    both = frames[-1], *ours[-1:]
    return " in ".join(f"{frame.filename.removeprefix(ROOT)}:{frame.lineno}" for frame in both)


@contextmanager
def waits(counted: Counter[str]) -> Iterator[None]:
    """Counts the waits of the host for the GPU inside, by line."""
    if not torch.cuda.is_available():
        yield
        return

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if "synchronizing" in str(message):
            counted[_project_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def train(case: Case) -> tuple[list[float], Counter[str]]:
    """Losses, gradient norms and evaluations; and the waits of all steps but the first."""
    counted, real, done = Counter[str](), training.train_step, []

    def step(*given: Any) -> Any:
        done.append(True)
        with waits(counted if len(done) > 1 else Counter()):
            return real(*given)

    changes = {"kv_channels": 64, "train_iters": STEPS, **case.changes}
    with mock.patch.object(training, "train_step", step):
        run = training_case.train(changes.pop("family", "llama"), **changes)
    return run.losses + run.grad_norms + run.evaluations, counted


def generate(case: Case) -> tuple[list[float], Counter[str]]:
    """The tokens of three texts; and the waits of decode steps that are recorded."""
    session_case.start()
    session = session_case.session(changes={"kv_channels": 64}, **case.changes)
    engine, found, counted = Engine(session, ByteTokenizer(0)), dict[str, list[float]](), Counter[str]()
    params = SamplingParams(num_tokens_to_generate=4 + DECODED, **case.params)
    for seed, prompt in enumerate(session_case.prompts(1, [20, 3, 7])):
        engine.add(Request(str(seed), prompt, params, seed, rules=case.rules))
    for number in range(4 + DECODED):
        with waits(counted if 2 <= number < 2 + STEPS else Counter()):
            outputs = engine.step()
        for output in outputs:
            found.setdefault(output.request, []).extend([token.id for token in output.tokens])
    assert session.graphs is None or not session.graphs.fails, "a step could not be captured"
    parallel_state.destroy_model_parallel()
    return [x for name in sorted(found) for x in found[name]], counted


def run(names: list[str], target: str) -> None:
    """Runs cases in this process, and writes what the last rank of each has, or the error."""
    ranks, found = Ranks(RANKS), {}
    for name in names:
        case = CASES[name]
        work: Callable = train if case.params is None else generate
        with tempfile.TemporaryDirectory() as folder:
            places = {key: folder if value == "FOLDER" else value for key, value in case.changes.items()}
            try:
                found[name] = ranks(case.ranks, work, case._replace(changes=places))[-1]
            except AssertionError as error:
                found[name] = str(error)
    ranks.close()
    Path(target).write_bytes(pickle.dumps(found))


# ------------------------------------------------------------------------------------------------ the comparison


def wrong(case: Case, there: Any, here: Any) -> str:
    """What is wrong with the numbers of a GPU (`there`) against those of a CPU, or nothing."""
    for where, found in (("GPU", there), ("CPU", here)):
        if isinstance(found, str):
            return f"on the {where}: {found.strip().splitlines()[-1]}"
    (numbers, counted), (expected, _) = there, here
    if len(numbers) != len(expected):
        return f"{len(numbers)} numbers, not {len(expected)}"
    apart = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(numbers, expected, strict=True))
    if not apart <= case.bound:
        return f"off by {apart:.1e}: {numbers}, not {expected}"
    steps = STEPS - 1 if case.params is None else STEPS
    if counted.total() > steps * case.waits:
        return f"{counted.total()} waits in {steps} steps, more than {case.waits} each: {dict(counted)}"
    return ""


def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        jobs = {}
        for where, launcher in (("gpu", ["-m", "tests.support.pretended_cuda"]), ("cpu", [])):
            command = [sys.executable, *launcher, "-m", "tests.campaigns.pretended_cuda", "--run", f"{folder}/{where}"]
            jobs[where] = subprocess.Popen([*command, *names], env=os.environ | {"OMP_NUM_THREADS": "1"})
        if any([job.wait() for job in jobs.values()]):
            return 1
        there, here = (pickle.loads(Path(folder, where).read_bytes()) for where in jobs)
    failed = 0
    for name in names:
        why = wrong(CASES[name], there[name], here[name])
        failed += bool(why)
        print(f"{name}: {why or 'the same'}", flush=True)
    print(f"{len(names)} cases, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[3:], sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:] or list(CASES)))
