"""Findings: bad values and bad data in a step, and how all ranks learn of them.

A rank that stopped at a finding would leave the other ranks waiting. So it records the finding and continues. The
reduction of the loss counts the findings of all ranks. If there are any, all ranks read them before the weights change.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.megatron_data_parallel import before_reduction
from megatron.context_parallel.patches.torch_foreach import norm_of_each
from megatron.context_parallel.runtime.comm.first_rank import of_all_ranks
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.model.data_parallel import DataParallel

SPIKE = 10  # times the largest loss of the first 100 micro batches, as in Megatron-LM


class Kind(IntEnum):
    """The kind of a finding, in the order of reporting."""

    DATA = 0
    LOSS = 1
    GRADIENT = 2
    SPIKE = 3


@dataclass(frozen=True, order=True)
class Finding:
    """A finding. Findings are reported in the order of their kind, then in the order of computation."""

    kind: Kind
    index: int  # of the micro batch, or of the parameter in the backward pass
    rank: int
    text: str


class Findings:
    """The findings of this rank in the current step: `found`.

    `values` are the values of the last pass by name: the mean loss of each micro batch on ranks of the last pipeline
    stage, then the norm of each parameter's gradient before the reduction over ranks. FSDP keeps only the reduced
    gradients, so its norms are those of this rank's shard.
    """

    def __init__(self, args: Arguments, model: list[DataParallel], machine: RerunStateMachine) -> None:
        self.args, self.machine = args, machine
        self.found: list[Finding] = []
        self.values: dict[str, float] = {}
        self.passes = 0  # over the batches of the step
        self._norms: dict[str, Tensor] = {}
        self._sharded: list[DataParallel] = []
        # A dynamic loss scale is adjusted by gradients that are not finite.
        if args.check_for_nan_in_loss_and_grad and (args.loss_scale or not args.fp16):
            for chunk in model:
                if isinstance(chunk, DistributedDataParallel):
                    self._watch_gradients(chunk)
                else:
                    self._sharded.append(chunk)

    def _watch_gradients(self, chunk: DistributedDataParallel) -> None:
        names = _names(chunk)
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            parameters = [parameter for bucket in group.buckets for parameter in bucket.params_list]
            keep = partial(self._keep_norms, [names[parameter] for parameter in parameters], parameters)
            before_reduction(group, keep)

    def _keep_norms(self, names: list[str], parameters: list[torch.nn.Parameter], **_: bool) -> None:
        norms = norm_of_each([parameter.main_grad for parameter in parameters])  # type: ignore[attr-defined]
        self._norms.update(zip(names, norms, strict=True))

    def note_data(self, line: str) -> None:
        """Record a finding about the data, in a line for the user."""
        self.found.append(Finding(Kind.DATA, 0, dist.get_rank(), line))

    def look(self, losses: list[Tensor]) -> None:
        """Record the losses of a pass (`losses`: as `run_micro_batches` returns them) and its gradients."""
        for chunk in self._sharded:
            self._norms.update(_norms_of_shares(chunk))
        parts = [*losses]
        if self._norms:
            norms = torch.stack([*self._norms.values()])  # on the host, if the optimizer is there
            there = torch.empty(len(norms), dtype=torch.float64, device=torch.cuda.current_device())
            parts.append(there.copy_(norms, non_blocking=True))
        numbers = torch.cat(parts).tolist() if parts else []  # a GPU is waited for once
        self.values = {}
        for number in range(len(losses)):
            total, tokens = numbers[3 * number : 3 * number + 2]
            self.values[f"loss of micro batch {number + 1} of {len(losses)}"] = total / max(tokens, 1.0)
        names = [f"gradient of {name}" for name in self._norms]
        self.values.update(zip(names, numbers[3 * len(losses) :], strict=True))
        self._norms = {}

    def note_numbers(self) -> None:
        """Record findings about values that are not finite, and about loss spikes."""
        args = self.args
        rank = dist.get_rank()
        for index, (name, value) in enumerate(self.values.items()):
            is_loss = name.startswith("loss")
            if args.check_for_nan_in_loss_and_grad and not math.isfinite(value):
                kind = Kind.LOSS if is_loss else Kind.GRADIENT
                self.found.append(Finding(kind, index, rank, f"{name} is {value}"))
            if args.check_for_spiky_loss and is_loss and self._is_spike(value):
                largest = self.machine.max_values["loss"]
                text = f"{name} is {value:.6f}, at least {SPIKE} times the largest of the first 100, {largest:.6f}"
                self.found.append(Finding(Kind.SPIKE, index, rank, text))

    def _is_spike(self, loss: float) -> bool:
        return self.machine.is_unexpectedly_large(torch.tensor(loss), SPIKE, "loss")

    def settle(self, iteration: int) -> list[str]:
        """Warnings about the findings of all ranks, which are then cleared. All ranks call it.

        Raises:
            UsageError: a finding is about the data.
            FloatingPointError: a loss or a gradient is not finite.
        """
        findings = sorted(finding for of_rank in of_all_ranks(self.found) for finding in of_rank)
        self.found = []
        for first in findings[:1]:
            if first.kind is Kind.DATA:
                raise UsageError(first.text)
            if first.kind is not Kind.SPIKE:
                raise FloatingPointError(f"iteration {iteration}: {_told(findings)}")
        return [f"iteration {iteration}: {finding.text}, on rank {finding.rank}" for finding in findings]


def _told(findings: list[Finding]) -> str:
    """The first finding, about a value that is not finite, and the number of further ones."""
    first = findings[0]
    not_finite = [finding for finding in findings if finding.kind is not Kind.SPIKE]
    text = f"{first.text} on rank {first.rank}"
    if len(not_finite) > 1:
        ranks = ", ".join(map(str, sorted({finding.rank for finding in not_finite})))
        text += f"; {len(not_finite)} values are not finite, on ranks {ranks}"
    return text


def _norms_of_shares(chunk: DataParallel) -> dict[str, Tensor]:
    gradients = {name: parameter.grad for parameter, name in _names(chunk).items()}
    shares = {name: x.to_local() for name, x in gradients.items() if isinstance(x, DTensor) and x.to_local().numel()}
    return {name: share.norm() for name, share in shares.items()}


def _names(chunk: DataParallel) -> dict[torch.nn.Parameter, str]:
    """megatron-core's names of the parameters, with the layer's number in the whole model, from 0."""
    layers = get_attr_wrapped_model(chunk, "decoder").layers
    numbers = {
        f"decoder.layers.{here}.": f"decoder.layers.{layer.layer_number - 1}." for here, layer in enumerate(layers)
    }
    names = {}
    for name, parameter in chunk.module.named_parameters():
        while name.startswith("module."):  # prefixes of Float16Module and Megatron-FSDP
            name = name.removeprefix("module.")
        prefix = next((prefix for prefix in numbers if name.startswith(prefix)), "")
        names[parameter] = numbers.get(prefix, "") + name.removeprefix(prefix)
    return names
