"""Finds the fastest strategy for packed documents, and whether their batches should bring placements of their own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron.context_parallel.cluster.description import Cluster, for_tensors
from megatron.context_parallel.cluster.step.documents_time import DocumentsAttention, documents_forecast
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.progress import tracked
from megatron.context_parallel.strategies import AUTO, parse_spec
from megatron.context_parallel.tokens.documents import Documents

from .candidates import Candidate, candidates
from .plainness import SURE, plainest, reason
from .planner import memory
from .step_search import FeasibleRun, StepSearch, forecasts, search_steps, workload_of

TAKEN = 8  # of the specs that are fastest without documents


class DocumentsChoice(NamedTuple):
    """A strategy, and whether each batch of documents brings its own placement."""

    spec: str
    placed: bool

    @property
    def flags(self) -> str:
        return f"--cp-strategy {self.spec}" + " --cp-place-documents" * self.placed


class DocumentsSearch(NamedTuple):
    """The result of `search_documents`.

    Attributes:
        seconds: of both passes of the attention of a layer, the mean of the micro batches, by choice; fastest first.
        batches: how many micro batches it is of.
    """

    seconds: dict[DocumentsChoice, float]
    batches: int

    @property
    def best(self) -> DocumentsChoice:
        """The fastest with a placement, if that saves enough (`SURE`); otherwise the plainest without one."""
        static = {choice.spec: seconds for choice, seconds in self.seconds.items() if not choice.placed}
        first = next(iter(self.seconds))
        if not static or (first.placed and self.seconds[first] < (1 - SURE) * min(static.values())):
            return first
        return DocumentsChoice(plainest(static), False)

    @property
    def headline(self) -> str:
        """One line: the choice, as flags that reproduce it, and what was predicted."""
        best, fastest = self.best, next(iter(self.seconds))
        other = self._fastest(placed=not best.placed)
        milliseconds = 1e3 * self.seconds[best]
        line = (
            f"--cp-strategy {AUTO}: chose {best.flags}; predicted for the documents of {self.batches} micro batches: "
            f"{milliseconds:.4g} ms of attention per layer and micro batch, "
        )
        if fastest.placed and not best.placed:  # near the fastest without a placement, which is near the fastest of all
            line += f"the plainest of {sum(not choice.placed for choice in self.seconds)} without placements"
        else:
            line += reason(best.flags, fastest.flags, len(self.seconds))
        if other:
            line += f"; {other.flags} takes {1e3 * self.seconds[other]:.4g} ms"
        return line

    def _fastest(self, placed: bool) -> DocumentsChoice | None:
        return next((choice for choice in self.seconds if choice.placed == placed), None)


def search_documents(
    model: ModelShape,
    run: TrainConfig,
    cluster: Cluster,
    ranked: Sequence[str],
    batches: Sequence[Documents],
    fixed: Mapping[str, Any],
    room: float,
    placing: Sequence[bool] = (False, True),
) -> DocumentsSearch:
    """Ranks strategies for micro batches of documents: the fastest ones without documents, and those made for them.

    Args:
        model, run, cluster: the attention, and where rank r of the run is device r.
        ranked: the specs that are fastest without documents, the fastest first.
        batches: the documents of some micro batches.
        fixed: options of all strategies that are given.
        room: bytes of a device for chunks and partials of attention.
        placing: which to try: tokens as the layout says (False), each batch's own placement (True).
    """
    made_for_documents = [*_made_for_documents(model, run, fixed, room)]
    choices = [DocumentsChoice(spec, False) for spec in [*ranked[:TAKEN], *made_for_documents] if False in placing]
    if True in placing:
        specs = made_for_documents if False in placing else [*ranked[:TAKEN], *made_for_documents]
        choices += [DocumentsChoice(spec, True) for spec in _in_one_layout(specs, fixed.get("layout"))]
    seconds = {}
    for choice in tracked(choices, "predicting documents"):
        of_batches = [
            documents_forecast(model, replace(run, cp_strategy=choice.spec), cluster, documents, choice.placed).seconds
            for documents in batches
        ]
        seconds[choice] = sum(of_batches) / len(batches)
    return DocumentsSearch(dict(sorted(seconds.items(), key=lambda item: item[1])), len(batches))


def search_steps_of_documents(
    model: ModelShape, cluster: Cluster, base: TrainConfig, documents: Documents
) -> StepSearch:
    """`search_steps` for micro batches of documents: the specs that it takes, and those made for documents.

    The latter are tried as the layout says, and with a placement. `documents` are those of a micro batch.
    """
    whole = search_steps(model, cluster, base)
    made_for_documents = [*_made_for_documents(model, base, {}, for_tensors(cluster.device.memory_GiB))]
    of_whole = [*dict.fromkeys(one.run.cp_strategy for one in whole.ranked)]
    choices = [DocumentsChoice(spec, False) for spec in [*of_whole, *made_for_documents]]
    choices += [DocumentsChoice(spec, True) for spec in _in_one_layout(made_for_documents, None)]
    ranked = list[FeasibleRun]()
    rejected = [*whole.rejected]
    for spec, placed in tracked(choices, "predicting documents"):
        attention = DocumentsAttention(documents, placed)
        found = forecasts(model, replace(base, cp_strategy=spec), cluster, attention, placed)
        ranked += found.ranked
        if spec in made_for_documents:  # the others are rejected already
            rejected += found.rejected
    return StepSearch(sorted(ranked, key=lambda one: one.forecast.seconds), rejected, whole.slower)


def _made_for_documents(model: ModelShape, run: TrainConfig, fixed: Mapping[str, Any], room: float) -> Iterator[str]:
    workload = workload_of(model, run)
    for found in candidates(workload, run.context_parallel_size, lambda size: 1.0, fixed, planned=False):
        if isinstance(found, Candidate) and max(memory(plan, workload) for plan in found.plans) <= room:
            yield found.choice.spec


def _in_one_layout(specs: Sequence[str], layout: str | None) -> Iterator[str]:
    """The specs with the given layout, or with the default one. A placement replaces it, so one stands for all."""
    for spec in specs:
        choice = parse_spec(spec)
        if choice.layout == (layout or choice.strategy.layouts[0]):
            yield spec
