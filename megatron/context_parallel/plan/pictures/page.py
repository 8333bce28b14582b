"""An interactive page of plans: one self-contained HTML file."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.context_parallel.plan.ir import Plan, Transfer
from megatron.context_parallel.plan.volume import Shape, chunk_bytes, units

from .draw import BLOCK, COLOURS, RANKS
from .lanes import BLOCKS, MEANING, Bar, Picture, picture

_TEMPLATE = Path(__file__).with_name("page.html")
_DATA = "{}</script>"  # the placeholder of the data in the template


def write_page(
    plans: Mapping[str, Sequence[Plan]],
    path: Path | str,
    heads: tuple[int, int] | None = None,
    shape: Shape | None = None,
) -> None:
    """Writes a page of plans to `path`: assignment matrix, lanes of each rank, a slider over time.

    Args:
        plans: the plans by their title on the page, each with its passes, forward and backward.
        heads: query heads and key/value heads of the model, for volume in units; default: equal numbers.
        shape: sizes on one rank, for volume in bytes instead of units.
    """
    shown = []
    for name, passes in plans.items():
        shown.append({"name": name, "passes": [_Pass(plan, heads, shape).data() for plan in passes]})
    data = {
        "blocks": {"name": BLOCKS, "colour": BLOCK},
        "tensors": {t: {"colour": colour, "meaning": MEANING[t]} for t, colour in COLOURS.items()},
        "ranks": RANKS,
        "measure": "bytes" if shape else "units",
        "plans": shown,
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    Path(path).write_text(_TEMPLATE.read_text(encoding="utf-8").replace(_DATA, f"{text}</script>", 1), encoding="utf-8")


class _Pass:
    """The data of one plan: the bars of `lanes.py`, each with its description."""

    def __init__(self, plan: Plan, heads: tuple[int, int] | None, shape: Shape | None) -> None:
        self.plan, self.shape = plan, shape
        self.kv_ratio = plan.kv_ratio(*heads) if heads else 1.0

    def data(self) -> dict:
        shown = picture(self.plan)
        return {
            "title": shown.title,
            "way": "backward" if self.plan.backward else "forward",
            "ranks": shown.ranks,
            "lanes": shown.lanes,
            "finish": shown.finish,
            "tensors": shown.tensors,
            "bars": [self._bar(bar, shown) for bar in shown.bars],
        }

    def _bar(self, bar: Bar, shown: Picture) -> dict:
        swap = shown.lanes[bar.lane] in {op.channel for op in self.plan.swaps_before}
        return {
            "rank": bar.rank,
            "lane": bar.lane,
            "start": bar.start,
            "end": bar.end,
            "tensor": bar.tensor,
            "texts": bar.texts,
            "pairs": bar.pairs,
            "step": bar.step,
            "sent": self._amount(bar.sent, swap),
            "to": [] if swap else sorted({t.receiver for t in bar.sent}),
            "from": [] if swap else sorted({t.sender for t in bar.received}),
            "says": self._says(bar, shown.lanes[bar.lane], swap),
        }

    def _says(self, bar: Bar, lane: str, swap: bool) -> list[str]:
        when = f"step {bar.step}, time {bar.start:g} to {bar.end:g}"
        if bar.tensor is None:
            queries = _list("query chunk", {q for q, _ in bar.pairs})
            keys = _list("key/value chunk", {kv for _, kv in bar.pairs})
            return [f"Rank {bar.rank} computes", queries, keys, when]
        lines = [f"Rank {bar.rank}: {bar.tensor}, {MEANING[bar.tensor]}"]
        for verb, way, transfers in (("sends", "to", bar.sent), ("receives", "from", bar.received)):
            if transfers:
                peers = {t.receiver if verb == "sends" else t.sender for t in transfers}
                part = f"1/{self.plan.head_parallel_size} of " if swap else ""
                what = _list(f"{verb} {part}chunk", {t.chunk for t in transfers})
                lines.append(f"{what} {_list(f'{way} rank', peers)}: {self._say_amount(self._amount(transfers, swap))}")
        return [*lines, f"channel {lane}", when]

    def _amount(self, transfers: Sequence[Transfer], swap: bool) -> float:
        if self.shape:
            return round(sum(chunk_bytes(self.plan, t.tensor, self.shape, swap) * t.share for t in transfers))
        return round(sum(units(t.tensor, self.kv_ratio) * t.share for t in transfers) / self.plan.rounds, 6)

    def _say_amount(self, amount: float) -> str:
        return f"{amount:,} bytes" if self.shape else f"{amount:g} units"


def _list(noun: str, numbers: set[int]) -> str:
    """`chunks 0, 2-5`"""
    parts: list[str] = []
    for _, items in itertools.groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0]):
        run = [number for _, number in items]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"
