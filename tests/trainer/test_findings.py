"""Wrong numbers on one rank are reported on all, and a repeated step shows which device is at fault."""

import math
import os
import re
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads

from megatron.context_parallel.commands.gpu_checks.common import synchronisations
from megatron.context_parallel.kernels.to_device import to_device
from megatron.context_parallel.patches.megatron_gradient_norm import norm_on_device
from megatron.context_parallel.trainer import training
from megatron.context_parallel.trainer.faults.findings import Findings
from tests.support import training_case, zero_case
from tests.support.pretended_gpu import GPU, pretended_gpu

PP, CP = "pipeline_model_parallel_size", "context_parallel_size"
FAULTY, END = 3, 4  # iterations
VALIDATE = {"rerun_mode": "validate_results"}
WEIGHT = "mlp.linear_fc2.weight"  # of the last layer


class Run(training_case.Recorder):
    """Losses and lines of a run on this rank, and how it ended: "", the text of an error, or its status."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.end = ""

    def say(self, line) -> None:
        self.lines.append(line)


def run(fault: str = "", times: int = 10**9, **changes) -> Run:
    """A run of END iterations; in iteration FAULTY rank 1 has a fault, the first `times` that it comes there."""
    args = training_case.case_args("llama", train_iters=END, **{CP: 2} | changes)
    recorder = Run()
    with training_case.groups(args):
        state = training_case.build(args)
        left = [times]

        def strikes() -> bool:
            left[0] -= state.progress.iteration == FAULTY - 1
            return dist.get_rank() == 1 and state.progress.iteration == FAULTY - 1 and left[0] >= 0

        inject(fault, state, strikes)
        data = [training_case.batches(args, state.progress.consumed_train_samples) for _ in state.model]
        try:
            training.train_loop(args, state, recorder, data, None, time.monotonic())
        except (FloatingPointError, SystemExit) as end:
            recorder.end = str(end)
        return recorder


def inject(fault: str, state, strikes) -> None:
    layer = training.get_attr_wrapped_model(state.model[0], "decoder").layers[-1]
    nothing = torch.tensor([3])
    if fault.startswith("gradient"):
        weight = layer.mlp.linear_fc2.weight
        weight.register_hook(lambda gradient: gradient.index_fill(0, nothing, math.nan) if strikes() else gradient)
    elif fault == "sum of gradients":
        layer.input_layernorm.register_forward_hook(
            lambda module, inputs, out: (
                out.register_hook(lambda gradient: gradient * math.nan if strikes() else gradient) and None
            )
        )
    elif fault == "bit flip":
        layer.input_layernorm.register_forward_hook(lambda module, inputs, out: flip(out) if strikes() else out)
    if fault.endswith("spike"):
        machine = state.findings.machine
        machine.large_value_counts["loss"], machine.max_values["loss"] = 100, 0.1
        if fault != "spike":  # else every loss is one
            machine.is_unexpectedly_large = lambda *_: state.progress.iteration == FAULTY - 2 and dist.get_rank() == 0


def flip(activation: torch.Tensor) -> torch.Tensor:
    """The same with the highest bit of the exponent of one number flipped."""
    flipped = activation.clone()
    flipped.detach().view(torch.int32).view(-1)[5] ^= 1 << 30
    return flipped


@pytest.fixture(scope="module")
def whole(ranks):
    """Losses of a run without a fault."""
    return ranks(2, run)[0].losses


def overlapped() -> Run:
    return run("gradient", overlap_grad_reduce=True, bf16=True, params_dtype=torch.bfloat16)


def test_a_gradient_is_named_with_its_rank_on_every_rank(ranks, whole):
    assert ranks(2, overlapped)[0].end == f"iteration {FAULTY}: gradient of decoder.layers.1.{WEIGHT} is nan on rank 1"
    for result in ranks(2, run, "gradient"):
        assert result.end == f"iteration {FAULTY}: gradient of decoder.layers.1.{WEIGHT} is nan on rank 1"
        assert result.losses == whole[: FAULTY - 1]


def sharded() -> Run:
    return run("sum of gradients", **zero_case.WAYS["optim_grads_params"])


def test_fsdp_names_a_gradient_before_the_weights_change(ranks, whole):
    for result in ranks(2, sharded):
        assert re.match(rf"iteration {FAULTY}: gradient of \S+ is nan on rank \d; \d+ values", result.end)
        assert result.losses == pytest.approx(whole[: FAULTY - 1], rel=1e-6)


def in_a_pipeline() -> Run:
    return run("gradient", **{CP: 1, PP: 2})


def test_a_layer_has_its_number_in_the_whole_model(ranks):
    assert ranks(2, in_a_pipeline)[0].end.startswith(
        f"iteration {FAULTY}: gradient of decoder.layers.1.{WEIGHT} is nan"
    )


def test_a_loss_is_named_with_its_micro_batch(ranks, whole):
    one, other = ranks(2, run, "bit flip", 1)
    assert one.end == other.end and f"iteration {FAULTY}: loss of micro batch 1 of 2 is " in one.end
    assert one.losses == whole[: FAULTY - 1]


def unchecked() -> Run:
    return run("gradient", check_for_nan_in_loss_and_grad=False)


def test_who_does_not_check_goes_on(ranks):
    result = ranks(2, unchecked)[0]
    assert not result.end and len(result.losses) == END and math.isnan(result.losses[-1])


def spiky(changes: dict) -> Run:
    return run("spike", check_for_spiky_loss=True, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({}, ", on rank 0"), (VALIDATE, "repeated, it is the same (likewise on ranks 1); training continues")],
)
def test_a_spike_is_told_and_the_run_goes_on(ranks, whole, changes, says):
    result = ranks(2, spiky, changes)[0]
    assert result.losses == whole and not result.end
    assert sum("10 times the largest of the first 100, 0.100000" in line for line in result.lines) >= END
    assert any(line.endswith(says) for line in result.lines)


# ---- computed again -----------------------------------------------------------------------------


def validated(fault: str, times: int, directory: str, host: str = "first") -> Run:
    """A run that validates results on a host of this name, and resumes from `directory` if it holds a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "uname", lambda: ("Linux", host))
        return run(fault, times, save=directory, load=directory, **VALIDATE)


def after_a_spike(directory: str) -> Run:
    """Rank 0 computes a spike again in the first step that is validated, and rank 1 a NaN in the next."""
    return run("gradient after a spike", 1, check_for_spiky_loss=True, save=directory, **VALIDATE)


def test_a_spike_before_does_not_hide_a_fault(ranks, tmp_path):
    result = ranks(2, after_a_spike, str(tmp_path))[1]
    assert result.end == "17" and sum("training continues" in line for line in result.lines) == 1


@pytest.mark.parametrize("fault", ["gradient", "bit flip"])
def test_a_fault_that_does_not_come_back_ends_the_run_before_the_weights_change(ranks, whole, tmp_path, fault):
    for result in ranks(2, validated, fault, 1, str(tmp_path)):
        assert result.end == "17"
        assert result.losses == whole[: FAULTY - 1]
    told = ranks(2, validated, "", 0, str(tmp_path))[0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(END)
    assert told.losses == whole[FAULTY - 1 :]


def test_a_fault_that_comes_back_is_computed_on_other_devices(ranks, whole, tmp_path):
    name = f"iteration {FAULTY}: gradient of decoder.layers.1.{WEIGHT} was nan on rank 1 (host first, device cpu)"
    first = ranks(2, validated, "gradient", 10**9, str(tmp_path))[0]
    assert first.end == "16" and first.lines[0].startswith(f"{name}; repeated, it is the same; restart with --load")
    same = ranks(2, validated, "gradient", 10**9, str(tmp_path))[0]
    assert same.end == "16" and "that is the same device" in same.lines[0]
    correct = ranks(2, validated, "gradient", 10**9, str(tmp_path), "second")[0]
    assert correct.end == "17" and "on host second, device cpu: likely a fault of the data" in correct.lines[0]
    faulty = ranks(2, validated, "", 0, str(tmp_path), "second")[0]
    assert (
        faulty.end == "17"
        and "on host second, device cpu: host first, device cpu is likely to be faulty" in faulty.lines[0]
    )
    without = ranks(2, run_on, str(tmp_path))[0]
    assert without.losses == whole[FAULTY - 1 :]


def run_on(directory: str) -> Run:
    return run(load=directory)


def test_the_host_waits_once_for_the_values_of_a_step_and_never_within_a_norm():
    findings = Findings(SimpleNamespace(check_for_nan_in_loss_and_grad=True, loss_scale=None, fp16=False), [], None)
    weights = {"a": torch.randn(4, 3), "b": torch.randn(5)}
    norm_on_device()
    current = patch.object(torch.cuda, "current_device", lambda: GPU)  # a device: without CUDA, numbers are refused
    with pretended_gpu(), synchronisations(GPU) as waits, current:
        gradients = {name: to_device(weight, GPU) for name, weight in weights.items()}
        flag = torch.zeros(1, dtype=torch.int, device=GPU)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, flag, [[*gradients.values()]], False)
        findings._keep_norms([*gradients], [SimpleNamespace(main_grad=x) for x in gradients.values()])
        losses = [to_device(torch.tensor(x, dtype=torch.float64), GPU) for x in ([6.0, 3.0, 1e9], [0.0, 0.0, 1e9])]
        assert waits() == 0
        findings.look(losses)
        assert waits() == 1
        in_host_memory, _ = clip_grads.l2_norm_impl(0, flag, [[*weights.values()]], False)
        assert in_host_memory.device == norm.device == GPU
    expected = {f"gradient of {name}": weight.norm().item() for name, weight in weights.items()}
    of_losses = {"loss of micro batch 1 of 2": 2.0, "loss of micro batch 2 of 2": 0.0}
    assert findings.values == of_losses | expected
    whole = torch.cat([weight.flatten() for weight in weights.values()]).norm().item()
    assert norm.host.tolist() == in_host_memory.host.tolist() == pytest.approx([whole], rel=1e-6)
