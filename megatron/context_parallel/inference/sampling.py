"""Samples the next tokens of sequences from their logits: greedy, or by temperature, top-k and top-p."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.inference.sampling_params import SamplingParams
from torch import Tensor

from megatron.context_parallel.kernels.to_device import to_device

from .faults import GRAMMAR, MISTAKE, NAN, GrammarFault

SORTED = 1024  # of the likeliest tokens, for top-k and top-p; all of them only where these are not enough
_FAULTS = {-1.0: NAN, -2.0: MISTAKE, -3.0: GRAMMAR}  # instead of a token
Top = tuple[tuple[int, float], ...]
Drawn = tuple[Tensor, Tensor, Tensor]  # of rows: tokens, sums of probabilities, and whether enough tokens were sorted


@dataclass(frozen=True)
class Token:
    """A token of a text.

    Attributes:
        id: the token.
        logprob: the natural logarithm of its probability by the model, before any rule and temperature; NaN if nobody
            asked for it.
        top: the most likely tokens with their log-probabilities, in descending order.
    """

    id: int
    logprob: float = math.nan
    top: Top = ()


class Draw(NamedTuple):
    """How the next token of a sequence is chosen.

    Of megatron-core's parameters, `top_k` 1 or `temperature` 0 selects the most likely token, the first of equals;
    `top_k` 0 and `top_p` 0 or 1 disable these; `top_n_logprobs` is the length of `Token.top`. `Token.logprob` is
    computed if `return_log_probs` is true or `top_n_logprobs` is not 0.

    Attributes:
        params: the parameters.
        seed: any integer.
        position: of the new token, from 0.
        min_p: tokens with less than this share of the highest probability are not chosen.
        change: changes the logits, float64 [vocabulary], before the choice; None: nothing does.
    """

    params: SamplingParams
    seed: int
    position: int
    min_p: float = 0.0
    change: Callable[[Tensor], Tensor] | None = None


def choose_tokens(logits: Sequence[Tensor], asked: Sequence[Draw]) -> list[Token | Exception]:
    """The next token of each of some sequences, or its error.

    A sample depends only on its seed and position, not on the number of ranks or on other sequences.

    Args:
        logits: [vocabulary] for each sequence, of the previous row; float32 or another floating dtype.
        asked: how the token of each is chosen.

    Returns:
        Tokens. A FloatingPointError replaces a token if a logit is NaN or all are infinite, and a GrammarFault if its
        change leaves no token.
    """
    rows = torch.stack([*logits])
    likeliest, peaks = _best(rows)
    limits, faults = _limits(asked)
    changed = _changed(rows, asked, faults)
    chosen, left = (likeliest, peaks) if changed is rows else _best(changed)
    totals, enough = torch.ones(2, len(rows), dtype=torch.float64, device=rows.device)
    for ordered, most in ((False, 0), (True, SORTED)):
        some = [i for i, limit in limits.items() if limit.ordered == ordered]
        _draw_some(changed, limits, some, most, (chosen, totals, enough))
    told = _Told(rows, asked)

    def read() -> list[list[list[float]]]:
        return _read(torch.stack([chosen.double(), peaks, left, totals, enough], -1), told.numbers(chosen))

    numbers, wanted = read()
    if some := [i for i, of_row in enumerate(numbers) if not of_row[-1]]:
        _draw_some(changed, limits, some, rows.shape[-1], (chosen, totals, enough))
        numbers, wanted = read()
    found = told.of(wanted)
    tokens = list[Token | Exception]()
    for i, (token, peak, best, total, _) in enumerate(numbers):
        if not math.isfinite(peak):
            tokens.append(FloatingPointError("a logit is NaN, or all are infinite"))
        elif i in faults:
            tokens.append(faults[i])
        elif best == -math.inf:
            tokens.append(GrammarFault())
        elif not 0 < total < math.inf:
            temperature = asked[i].params.temperature
            tokens.append(FloatingPointError(f"the probabilities at temperature {temperature} add up to {total}"))
        else:
            tokens.append(Token(int(token), *found.get(i, ())))
    return tokens


def _best(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the likeliest tokens of each row, and its logit in float64. NaN is more than any number."""
    tokens = rows.argmax(-1, keepdim=True)
    return tokens.squeeze(-1), rows.gather(-1, tokens).squeeze(-1).double()


def _rows(x: Tensor, where: Tensor) -> Tensor:
    """Some rows of a tensor, by ascending indices on its device: a copy, or `x` itself if they are all."""
    return x if len(where) == len(x) else x.index_select(0, where)


def _draw_some(changed: Tensor, limits: Mapping[int, "_Limit"], some: list[int], most: int, into: Drawn) -> None:
    """Draws for some rows of `changed`. `into` has the tokens, sums and flags of all rows, as `_draw` returns them."""
    if not some:
        return
    where = to_device(torch.tensor(some), changed.device)
    drawn = _draw(_rows(changed, where).double(), [limits[i] for i in some], most)
    for all_rows, of_some in zip(into, drawn, strict=True):
        all_rows.index_copy_(0, where, of_some)


def _read(*parts: Tensor) -> list[list[list[float]]]:
    """The rows of float64 tensors on the host, which waits for the device once."""
    numbers = torch.cat([part.flatten() for part in parts]).tolist()
    found = []
    for part in parts:
        width = part.shape[1]
        found.append([numbers[at * width : (at + 1) * width] for at in range(len(part))])
        numbers = numbers[part.numel() :]
    return found


class _Told:
    """`Token.logprob` and `Token.top` of those that want them.

    Args:
        rows: [rows, vocabulary], the logits.
    """

    def __init__(self, rows: Tensor, asked: Sequence[Draw]) -> None:
        wants = [(i, one.params) for i, one in enumerate(asked)]
        self.some = [i for i, params in wants if params.return_log_probs or params.top_n_logprobs]
        self.counts = [asked[i].params.top_n_logprobs for i in self.some]
        self.most = min(max(self.counts, default=0), rows.shape[-1])
        self._logprobs = rows.new_empty(0, 1, dtype=torch.float64)
        if self.some:
            self._where = to_device(torch.tensor(self.some), rows.device)
            self._logprobs = _rows(rows, self._where).double().log_softmax(-1)

    def numbers(self, chosen: Tensor) -> Tensor:
        """For each of `some` the log-probability of its token, and of the likeliest with their tokens: float64.

        Args:
            chosen: the tokens of all rows.
        """
        if not self.some:
            return self._logprobs
        parts = [self._logprobs.gather(-1, _rows(chosen, self._where).unsqueeze(-1))]
        if self.most:
            values, tokens = self._logprobs.topk(self.most)
            parts += [values, tokens.double()]
        return torch.cat(parts, -1)

    def of(self, numbers: Sequence[Sequence[float]]) -> dict[int, tuple[float, Top]]:
        """What is told, by row; without tokens that the model excludes (-inf). `numbers`: what `numbers` returned."""
        told = {}
        for i, count, (logprob, *pairs) in zip(self.some, self.counts, numbers, strict=True):
            likeliest = zip(pairs[self.most :][:count], pairs[: self.most][:count], strict=True)
            top = tuple([(int(token), value) for token, value in likeliest if value > -math.inf])
            told[i] = (logprob, top)
        return told


def _changed(rows: Tensor, asked: Sequence[Draw], faults: dict[int, Exception]) -> Tensor:
    """The rows with the changes of their requests, in float64 if there are any. An error of one goes to `faults`."""
    if not any(draw.change for draw in asked):
        return rows
    changed = rows.double()
    for i, draw in enumerate(asked):
        if draw.change:
            try:
                changed[i] = draw.change(rows[i].double())
            except Exception as error:
                faults[i] = error
    return changed


class _Limit(NamedTuple):
    """How a token is drawn, with a random number in [0, 1)."""

    temperature: float
    top_k: int
    top_p: float
    uniform: float
    min_p: float

    @property
    def ordered(self) -> bool:
        """Whether only some of the likeliest tokens may come."""
        return bool(self.top_k or 0 < self.top_p < 1)


def _limits(asked: Sequence[Draw]) -> tuple[dict[int, _Limit], dict[int, Exception]]:
    """The limits of those that are drawn, by their place, and the errors in finding them."""
    limits = dict[int, _Limit]()
    faults = dict[int, Exception]()
    for i, draw in enumerate(asked):
        params = draw.params
        if params.top_k != 1 and params.temperature != 0:
            try:
                temperature, top_p = float(params.temperature), float(params.top_p)
                uniform = _uniform(draw.seed, draw.position)
                limits[i] = _Limit(temperature, int(params.top_k), top_p, uniform, draw.min_p)
            except Exception as error:
                faults[i] = error
    return limits, faults


def _draw(logits: Tensor, limits: Sequence[_Limit], most: int) -> Drawn:
    """For each row the token at which the cumulative probability of the remaining tokens exceeds `uniform` times their
    sum, and that sum. Nothing is read on the host.

    Args:
        logits: float64 [rows, vocabulary].
        most: how many of the likeliest tokens are sorted for rows with limits; 0: no row has any.

    Returns:
        The tokens, the sums, and 1 where the sorted tokens were enough, else 0; each [rows].
    """
    columns = logits.shape[-1]
    numbers = [
        (one.temperature, one.uniform, one.top_p or 1.0, min(one.top_k or columns, columns), one.min_p)
        for one in limits
    ]
    given = to_device(torch.tensor(numbers, dtype=torch.float64), logits.device)
    temperature, uniform, top_p, top_k, min_p = given.unbind(-1)
    # At most 0 before the division, so that with a small temperature scores overflow only to a probability of 0.
    scores = (logits - logits.amax(-1, keepdim=True)).div_(temperature.unsqueeze(-1))
    if any(one.min_p for one in limits):
        scores = scores.masked_fill(scores < min_p.log().unsqueeze(-1), -math.inf)
    if not most:
        cumulated = scores.softmax(-1).cumsum(-1)
        total = cumulated[:, -1]
        return _first_beyond(cumulated, uniform, total), total, torch.ones_like(total)
    values, order = _likeliest(scores, most)
    allowed = torch.arange(values.shape[-1], device=logits.device) < top_k.unsqueeze(-1)
    probabilities = values.masked_fill(~allowed, -math.inf).softmax(-1)
    if not all(0 < one.top_k < columns for one in limits):
        of_all = scores.softmax(-1).gather(-1, order)
        probabilities = torch.where((top_k < columns).unsqueeze(-1), probabilities, of_all)
    cumulated = probabilities.cumsum(-1)
    allowed &= (cumulated - probabilities < top_p.unsqueeze(-1)) | (top_p >= 1).unsqueeze(-1)
    last = (allowed.sum(-1, keepdim=True) - 1).clamp_min(0)
    total = cumulated.gather(-1, last).squeeze(-1)
    # Tokens like the last of the sorted ones may be missing, and those of a larger top-k from the sum.
    enough = (values.gather(-1, last).squeeze(-1) > values[:, -1]) & ((top_k <= most) | (top_k == columns))
    enough |= most >= columns
    index = _first_beyond(cumulated, uniform, total)
    return order.gather(-1, index.unsqueeze(-1)).squeeze(-1), total, enough.double()


def _likeliest(scores: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The largest scores [rows, most] in descending order, and their tokens, the first of equals first."""
    if most >= scores.shape[-1]:
        return scores.sort(dim=-1, descending=True, stable=True)
    tokens = scores.topk(most, sorted=False).indices.sort().values
    values, order = scores.gather(-1, tokens).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(-1, order)


def _first_beyond(cumulated: Tensor, uniform: Tensor, total: Tensor) -> Tensor:
    """For each row the first index at which `cumulated` exceeds uniform times total."""
    # Below the sum even after rounding, so that a token with probability 0 is never sampled.
    passed = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulated, passed.unsqueeze(-1), right=True)
    return index.clamp_max(cumulated.shape[-1] - 1).squeeze(-1)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def as_numbers(token: Token | Exception, most: int) -> list[float]:
    """A token, or the error in its place, as 2 + 2 * `most` numbers, with space for `most` pairs of `Token.top`."""
    if isinstance(token, Exception):
        return [_fault_number(token)] * (2 + 2 * most)
    pairs = [x for pair in token.top for x in pair]
    return [token.id, token.logprob, *pairs, *[-1.0] * (2 * most - len(pairs))]


def _fault_number(error: Exception) -> float:
    if isinstance(error, FloatingPointError):
        return -1.0
    return -3.0 if isinstance(error, GrammarFault) else -2.0


def from_numbers(numbers: Sequence[float], top: int) -> Token | str:
    """The token, with the first `top` pairs, or the error."""
    if numbers[0] in _FAULTS:
        return _FAULTS[numbers[0]]
    pairs = zip(numbers[2::2], numbers[3::2], strict=True)
    likeliest = tuple([(int(token), logprob) for token, logprob in pairs if token >= 0])
    return Token(int(numbers[0]), numbers[1], likeliest[:top])
