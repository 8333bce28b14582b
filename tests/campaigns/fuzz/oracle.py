"""Attention by its definition, dense in float64: the expected results of a fuzzed call, and the allowed errors.

Nothing here uses the package: positions, documents, masks, softmax and gradients are computed independently.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tests.campaigns.fuzz.case import Call

WHAT = ("out", "lse", "dq", "dk", "dv", "dsinks")
TINY = 1e-30  # absolute: float32 has no number below 1e-38, and weights that small vanish


class Inputs(NamedTuple):
    q: Tensor  # [s, b, heads, d]
    k: Tensor  # [t, b, kv_heads, d]
    v: Tensor  # [t, b, kv_heads, dv]
    dout: Tensor  # [s, b, heads, dv]
    sinks: Tensor | None  # [heads]


class Answer(NamedTuple):
    """Of each of `WHAT`: the exact value, and two sizes of its rounding errors, all float64 and of one shape.

    `terms` is the sum of the magnitudes that are added up to the value, each times the error, in units of rounding, of
    the weight it has; `rounded` is the magnitude of what is rounded to the model's dtype on its way.
    """

    value: Tensor
    terms: Tensor
    rounded: Tensor


def inputs(call: Call) -> Inputs:
    """The tensors of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(call.seed)
    t, dv = call.kv_length or call.length, call.value_dim or call.head_dim
    shapes = {"q": (call.length, call.heads, call.head_dim), "k": (t, call.kv_heads, call.head_dim)}
    shapes |= {"v": (t, call.kv_heads, dv), "dout": (call.length, call.heads, dv)}
    x = {
        name: torch.randn(s, call.batch, h, d, generator=generator, dtype=torch.float64)
        for name, (s, h, d) in shapes.items()
    }
    if call.inputs == "large":
        x["q"], x["k"] = x["q"] * 12, x["k"] * 12
    if call.inputs == "sink":
        x["q"] = x["q"] + 2
        x["k"][0] = 3.0
        x["v"][0] *= 1e-4
    if call.expanded:
        x["k"][:], x["v"][:], x["dout"][:] = x["k"][:, :, :1], x["v"][:, :, :1], x["dout"][0, 0, 0, 0]
    if call.dout == "gaps":
        x["dout"][torch.rand(call.length, generator=generator) < 0.6] = 0.0
    x["dout"] *= {"tiny": 1e-12, "huge": 1e12}.get(call.dout, 1.0)
    dtype = getattr(torch, call.dtype)
    tensors = [tensor.to(dtype) for tensor in x.values()]
    if not call.sinks:
        return Inputs(*tensors, None)
    sinks = torch.randn(call.heads, generator=generator, dtype=torch.float64)
    return Inputs(*tensors, sinks.to(getattr(torch, call.sinks_dtype or call.dtype)))


def positions(layout: str, chunk: int, n: int, length: int) -> list[int]:
    """The tokens of a chunk, in the order its rank has them."""
    if layout == "contiguous":
        return [i for i in range(length) if i * n // length == chunk]
    if layout == "cyclic":
        return [i for i in range(length) if i % n == chunk]
    assert layout == "zigzag", f"tests/campaigns/fuzz/oracle.py has no definition of the layout {layout}: write it"
    return [i for i in range(length) if i * 2 * n // length in (chunk, 2 * n - 1 - chunk)]


def placed_positions(slices: list[list[list[int]]], chunk: int, n: int) -> list[int]:
    """The tokens of the batch, its samples end to end, of a chunk of n. Heads may share a chunk of the placement."""
    everything = [token for of_chunk in slices for first, end in of_chunk for token in range(first, end)]
    rows = len(everything) // n
    return everything[chunk * rows : (chunk + 1) * rows]


def end_to_end(x: Tensor) -> Tensor:
    """[s, b, ...] to [b * s, 1, ...]."""
    return x.transpose(0, 1).flatten(0, 1).unsqueeze(1)


def in_samples(x: Tensor, batch: int) -> Tensor:
    """The inverse of `end_to_end`."""
    return x.squeeze(1).unflatten(0, (batch, -1)).transpose(0, 1)


def seen(call: Call) -> Tensor:
    """Which key each query sees, bool [1 or batch, s, t]."""
    s, t = call.length, call.kv_length or call.length
    i, j = torch.arange(s).unsqueeze(1) + (t - s), torch.arange(t)
    allowed = torch.ones(1, s, t, dtype=torch.bool)
    if call.causal:
        allowed = allowed & (j <= i)
    before, after = call.window
    if before >= 0:
        allowed = allowed & (i - j <= before)
    if after >= 0:
        allowed = allowed & (j - i <= after)
    if call.documents is None:
        return allowed
    runs_of_tokens = []
    for sample in call.documents:
        runs = [run if name >= 0 else -1 for run, (name, _) in enumerate(sample)]
        counts = torch.tensor([count for _, count in sample])
        runs_of_tokens.append(torch.tensor(runs).repeat_interleave(counts))
    of_token = torch.stack(runs_of_tokens)
    return allowed & (of_token[:, :, None] == of_token[:, None, :]) & (of_token >= 0)[:, :, None]


def unseen(call: Call) -> tuple[Tensor, Tensor]:
    """The queries that see nothing, such as padding, bool [s, b], and the keys that no query sees, bool [t, b]."""
    allowed = seen(call).expand(call.batch, -1, -1)
    return ~allowed.any(2).T, ~allowed.any(1).T


class _Dense(NamedTuple):
    """A computed attention, heads first; keys and values are repeated for the query heads that share them."""

    q: Tensor  # [b, heads, s, d]
    k: Tensor  # [b, heads, t, d]
    v: Tensor  # [b, heads, t, dv]
    seen: Tensor  # [1 or b, 1, s, t]
    weights: Tensor  # [b, heads, s, t]
    sink_weight: Tensor  # [b, heads, s, 1]
    out: Tensor  # [b, heads, s, dv]
    lse: Tensor  # [b, heads, s]


def _scale(call: Call) -> float:
    return call.head_dim**-0.5 if call.scale is None else call.scale


def _dense(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> _Dense:
    group = call.heads // call.kv_heads
    q = q.permute(1, 2, 0, 3)
    k, v = (x.permute(1, 2, 0, 3).repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * _scale(call)
    if call.softcap:
        scores = call.softcap * (scores / call.softcap).tanh()
    allowed = seen(call).unsqueeze(1)
    sink = scores.new_full((call.heads,), -torch.inf) if sinks is None else sinks
    logits = torch.cat(
        (torch.where(allowed, scores, -torch.inf), sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), 3
    )
    largest = logits.detach().amax(3, keepdim=True)
    powers = (logits - largest.masked_fill(largest.isneginf(), 0.0)).exp()
    total = powers.sum(3, keepdim=True)  # 0 in a row that sees nothing
    weights = powers / total.masked_fill(total == 0, 1.0)
    lse = (largest + total.log()).squeeze(3)
    return _Dense(q, k, v, allowed, weights[..., :-1], weights[..., -1:], weights[..., :-1] @ v, lse)


def answers(call: Call) -> list[Answer]:
    """Of out, lse, dq, dk, dv and, with sinks, dsinks; shaped as the package returns them."""
    *tensors, sinks = (x if x is None else x.double() for x in inputs(call))
    q, k, v, dout = tensors
    leaves = [x.requires_grad_() for x in (q, k, v, sinks) if x is not None]
    dense = _dense(call, q, k, v, sinks)
    grads = torch.autograd.grad(dense.out, leaves, dout.permute(1, 2, 0, 3))
    values = [dense.out.permute(2, 0, 1, 3), dense.lse.permute(2, 0, 1), *grads]
    with torch.no_grad():
        terms, rounded = _errors(call, dense, dout.permute(1, 2, 0, 3), sinks)
        rounded = [value.abs() + more for value, more in zip(values, rounded, strict=True)]
    return [
        Answer(value.detach(), term.detach(), more.detach())
        for value, term, more in zip(values, terms, rounded, strict=True)
    ]


def _errors(call: Call, dense: _Dense, dout: Tensor, sinks: Tensor | None) -> tuple[list[Tensor], list]:
    """`Answer.terms`, and what `Answer.rounded` has besides the value's own magnitude.

    A score is off by as many roundings as the largest sum of |q k| a row sees, and its weight in proportion. A gradient
    of a score is the difference of dout v and dout out: both count, even where they cancel. The second is made from an
    output that was rounded to the model's dtype.
    """
    dense = _Dense(*(x.float() for x in dense))  # sizes need no more, and half the time
    q, k, v, dout = dense.q.abs(), dense.k.abs(), dense.v.abs(), dout.abs().float()
    largest = (q @ k.mT * abs(_scale(call))).mul(dense.seen).amax(3, keepdim=True)
    if sinks is not None:
        largest = torch.maximum(largest, sinks.abs().float().view(1, -1, 1, 1))
    off = 1 + largest
    out = dense.weights @ v
    delta, delta_rounded = ((dout * x).sum(3, keepdim=True) for x in (out, dense.out.abs()))
    dscores = off * dense.weights * (dout @ v.mT + delta) * abs(_scale(call))
    dscores_rounded = dense.weights * delta_rounded * abs(_scale(call))

    def of_keys(x: Tensor) -> Tensor:
        return x.unflatten(1, (call.kv_heads, -1)).sum(2).permute(2, 0, 1, 3)

    terms = [(off * out).permute(2, 0, 1, 3), (off + dense.lse.nan_to_num(neginf=0.0).abs().unsqueeze(3))]
    terms[1] = terms[1].squeeze(3).permute(2, 0, 1)
    terms += [(dscores @ k).permute(2, 0, 1, 3), of_keys(dscores.mT @ q), of_keys((off * dense.weights).mT @ dout)]
    rounded = [0.0, 0.0, (dscores_rounded @ k).permute(2, 0, 1, 3), of_keys(dscores_rounded.mT @ q), 0.0]
    if sinks is not None:
        terms.append((off * dense.sink_weight * delta).sum((0, 2, 3)))
        rounded.append((dense.sink_weight * delta_rounded).sum((0, 2, 3)))
    return terms, rounded


UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-24, "float16": 2.0**-24}  # rounding of partials
NARROW = {"float64": 0.0, "float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # of results to the model's dtype
TINY_NARROW = {"float16": 2.0**-25}  # absolute: smaller numbers than 2**-14 have fewer digits
UNITS = 8.0  # roundings a term, 20 in ATen's exponentials at worst; in 3000 calls no row was beyond 0.9 of this
ROUNDED_ONCE = 0.65  # of the worst case, over many elements: 1.5 times the 0.43 of one process
MANY = 1000  # elements


def excess(call: Call, what: str, answer: Answer, got: Tensor, sent_narrow: int = 0) -> float:
    """The largest error of a row, or of the whole tensor, over what is allowed; above 1, or nan, is wrong.

    `sent_narrow`: how often a partial may be rounded to 16 bits because it is sent.
    """
    blind = answer.value.isneginf()
    if got.shape != answer.value.shape or not torch.equal(got.isneginf(), blind):
        return torch.inf
    dtypes = {call.dtype, call.sinks_dtype or call.dtype} if what == "dsinks" else {call.dtype}
    narrow = 0.0 if what == "lse" else max(NARROW[dtype] for dtype in dtypes)  # lse stays as wide as partials
    unit = max(UNIT[dtype] for dtype in dtypes) + UNIT["float64"]  # the expected value is rounded too
    allowed = (UNITS * unit + sent_narrow * narrow / 2) * answer.terms + narrow * answer.rounded
    if narrow:
        allowed = allowed + (1 + sent_narrow) * max(TINY_NARROW.get(dtype, 0.0) for dtype in dtypes)
    error, allowed = (x.double().masked_fill(blind, 0.0) for x in (got.double() - answer.value, allowed))
    by_row = [x.norm(dim=3) if x.dim() == 4 else x.abs() for x in (error, allowed)]
    largest = (by_row[0] / (by_row[1] + TINY)).max()
    many = allowed.square().sum() ** 2 / (allowed**4).sum() >= MANY  # elements of about one size
    if narrow and many:
        largest = torch.maximum(largest, error.norm() / allowed.norm() / ROUNDED_ONCE)
    return largest.item()
