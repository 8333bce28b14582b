"""Continuous batching: requests join while others decode, and long prompts are prefilled in parts."""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.runtime.comm.flight_recorder import recorder

from .cache_session import CacheSession
from .change_logits import TextSoFar, change_logits
from .faults import GRAMMAR, MISTAKE, NAN, GrammarFault, log_fault
from .grammar import Grammars, Matcher
from .handoff.sequences import HandedSequences
from .prefill_chunks import PrefillChunks
from .prefixes import Prefixes, Prompt
from .prompt_scores import score_prompt
from .request import Request, RequestOutput
from .sampling import Draw, Token, as_numbers, choose_tokens, from_numbers
from .text_stream import TextStream
from .tokenizer import Tokenizer

OVERTAKE = 8  # requests that may start before one that does not fit
SCORED = 512  # prompt tokens of a step that keeps the logits of all of them


@dataclass
class _Waiting:
    """A request that does not run yet, and how many later ones have started before it."""

    request: Request
    prompt: Prompt
    overtaken: int = 0


@dataclass
class _Running:
    """A request with a sequence in the cache, which contains the first `cached` of its tokens."""

    request: Request
    sequence: int
    tokens: list[int]
    cached: int
    stream: TextStream
    reused: int
    matcher: Matcher | None
    chosen: list[Token] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)  # of a scored request, with their log-probabilities

    @property
    def ends_at_end_token(self) -> bool:
        """Whether an end token ends the text: always if it follows a grammar, which allows nothing behind the end."""
        return self.matcher is not None or not self.request.rules.ignore_ends


class Engine:
    """Generates text for many requests at once. Steps depend only on added and cancelled requests, so ranks agree.

    An error that belongs to one request ends only that request, on all ranks in the same step. The rank with the logits
    broadcasts an error in choosing a token; an error in a text occurs on every rank. An error of a pass belongs to all
    requests: `step` raises it.

    Sequences stay in the cache after their end, until the space is needed. The next turn of a conversation continues
    from there, and prompts with a common prefix share it. If weights change in between, call `forget`.

    Args:
        cache: a `Session` that nothing else uses.
        tokenizer: converts tokens to text.
        chunks: the maximum number of prompt tokens per step, besides one token of each text that is being generated.
            Half of them are for the first prompt, the others for the shortest ones.
        length: maximum tokens of a request, prompt and text together; default: the size of the cache. If all layers
            have windows, a request may be longer than the cache.
        waste: rows of pages that a sequence may leave unused, in total over all ranks.
        handed: what decoders of other programs may fetch of this rank's rows; without it, requests have no handoff.

    Attributes:
        passes: the number of forward passes so far, without those of `warm_up`.
    """

    def __init__(
        self,
        cache: CacheSession,
        tokenizer: Tokenizer,
        chunks: int | PrefillChunks = 512,
        length: int | None = None,
        waste: int = 0,
        handed: HandedSequences | None = None,
    ) -> None:
        self.cache, self.tokenizer, self.waste = cache, tokenizer, waste
        self.chunks = PrefillChunks.fixed(chunks) if isinstance(chunks, int) else chunks
        self.handed = handed
        self.pinned: dict[str, _Running] = {}  # prefilled and not yet released, by the name of the handoff
        self.capacity = cache.room()
        self.length = length or self.capacity
        if self.capacity < self._most_rows(self.length):
            self.length = self.capacity
        self.passes = 0
        self.waiting: deque[_Waiting] = deque()
        self.running: dict[str, _Running] = {}
        self._reusable: OrderedDict[int, int] = OrderedDict()  # ended sequences: their cached tokens; most recent last
        self._prefixes = Prefixes()
        self._ended: list[RequestOutput] = []  # outside of passes
        self._grammars = Grammars(tokenizer, cache.vocabulary)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self.waiting or self.running or self._ended)

    @property
    def blocked(self) -> bool:
        """Whether a step would do nothing until a pinned sequence is released."""
        return bool(self.pinned) and not (self.running or self._ended)

    def warm_up(self) -> None:
        """Compute a dummy prompt and token, so that lazy initialization happens now. Every rank calls it."""
        self._grammars.prepare()
        recorder.enter("forward", 1)
        sequence = self.cache.open()
        for tokens in ([0, 0], [0]):
            self.cache.forward({sequence: tokens})
        self.cache.free(sequence)

    def check(self, tokens: Sequence[int], new: int) -> None:
        """Reject a prompt that can never run.

        Raises:
            UsageError: it is empty, has an unknown token, or is too long with `new` tokens after it.
        """
        if not tokens:
            raise UsageError("prompt: no tokens; give at least one")
        if wrong := [token for token in tokens if not 0 <= token < self.cache.vocabulary]:
            raise UsageError(f"prompt: token {wrong[0]}; the vocabulary is 0 to {self.cache.vocabulary - 1}")
        if len(tokens) + new > self.length:
            left = self.length - len(tokens)
            advice = f"give at most {left} new tokens" if left > 0 else f"give a prompt below {self.length} tokens"
            raise UsageError(f"prompt of {len(tokens)} tokens and {new} new ones: more than {self.length}; {advice}")

    def add(self, request: Request) -> None:
        """Queue a request until the cache has space.

        Raises:
            UsageError: it can never run.
        """
        self.check(request.tokens, request.params.num_tokens_to_generate)
        if request.handoff and request.end > self.capacity:
            raise UsageError(f"prompt of {request.end} tokens: more than {self.capacity} for a decoder; give fewer")
        self.waiting.append(_Waiting(request, Prompt(request.key, request.tokens)))

    def cancel(self, name: str) -> None:
        """End a request now; requests that have ended are ignored."""
        if name in self.running:
            self._retire(self.running.pop(name))
        elif any(waiting.request.name == name for waiting in self.waiting):
            self.waiting = deque(waiting for waiting in self.waiting if waiting.request.name != name)
        else:
            return
        self._ended.append(RequestOutput(name, finish="cancelled"))

    def release(self, handoff: str) -> None:
        """End the handoff of a sequence, prefilled or not; unknown ones are ignored. It is kept for later prompts."""
        for name, run in self.running.items():
            if run.request.handoff == handoff:
                self.pinned[handoff] = self.running.pop(name)
                break
        if handoff in self.pinned:
            self._retire(self.pinned.pop(handoff))

    def refuse(self, name: str, why: str) -> None:
        """End a request that was not added, with an error."""
        self._ended.append(RequestOutput(name, finish="error", why=why))

    def forget(self) -> None:
        """Drop the sequences that are kept for later prompts.

        Every rank calls it when weights of the model change: a prompt would share keys and values of the old ones.

        Raises:
            RuntimeError: requests run or are pinned. Their own keys and values are of the old weights too.
        """
        if self.running or self.pinned:
            raise RuntimeError(f"{len(self.running) + len(self.pinned)} requests have not ended")
        for sequence in [*self._reusable]:
            self._evict(sequence)

    def step(self) -> list[RequestOutput]:
        """Compute one token of each running text, and parts of the prompts. Every rank calls it."""
        self._admit()
        outputs, self._ended = self._ended, []
        if not (new := self._schedule_tokens()):
            return outputs
        self._make_room_for_step(sum(map(len, new.values())))
        logits = self.cache.forward(new, scored=[run.sequence for run in self.running.values() if run.request.scored])
        self.passes += 1
        complete = []
        for run in self.running.values():
            if run.request.scored and run.sequence in new:
                self._score(run, len(new[run.sequence]))
            run.cached += len(new.get(run.sequence, ()))
            self._prefixes.add(run.sequence, run.request.key, run.tokens, run.cached)
            if run.sequence in new and run.cached == len(run.tokens):
                complete.append(run)
            elif self.handed and run.request.handoff:
                self.handed.finish_rows(run.request.handoff, run.sequence, run.cached)
        tokens = self._sample(complete, logits)
        return outputs + [self._append_token(run, token) for run, token in zip(complete, tokens, strict=True)]

    # -- which tokens ---------------------------------------------------------------------------------------------

    def _schedule_tokens(self) -> dict[int, list[int]]:
        """The new tokens of a step by sequence.

        Half of the prompt tokens are for the prompt that started first, so that each one ends. The others are for the
        shortest ones, so that a long prompt does not delay them.
        """
        new = dict[int, list[int]]()
        prompts = list[_Running]()
        for run in self.running.values():
            if len(run.tokens) - run.cached == 1:
                new[run.sequence] = run.tokens[-1:]
            else:
                prompts.append(run)
        left = self._prompt_budget(prompts)
        ends = {run.sequence: run.cached for run in prompts}
        oldest = [(run, left - left // 2) for run in prompts[:1]]
        shortest = sorted(prompts, key=lambda run: len(run.tokens) - run.cached)
        for run, most in oldest + [(run, left) for run in shortest]:
            share = min(len(run.tokens) - ends[run.sequence], most, left)
            ends[run.sequence] += share
            left -= share
        return new | {
            run.sequence: run.tokens[run.cached : end] for run in prompts if (end := ends[run.sequence]) > run.cached
        }

    def _prompt_budget(self, prompts: list[_Running]) -> int:
        """How many tokens of some prompts a step computes."""
        if not prompts:
            return 0
        cached = max(run.cached for run in prompts)
        chosen = self.chunks(cached, any(run.chosen for run in self.running.values()))
        return min(chosen, SCORED) if any(run.request.scored for run in prompts) else chosen

    def _score(self, run: _Running, count: int) -> None:
        """Add the log-probabilities of the tokens that follow `count` new tokens of a prompt."""
        prompt = run.request.tokens
        stop = min(run.cached + count, len(prompt) - 1)
        if run.cached < stop:
            top = run.request.params.top_n_logprobs
            run.prompt += score_prompt(self.cache, run.sequence, prompt, run.cached, stop, top)

    def _sample(self, runs: list[_Running], logits: Mapping[int, Tensor]) -> list[Token | str]:
        """The next token of each request, or an error: the rank that has the logits samples, and sends the result."""
        if not runs:
            return []
        most = max(run.request.params.top_n_logprobs for run in runs)
        allowed = {run.sequence: _allowed(run.matcher) for run in runs if run.matcher}  # on every rank
        ours = [run for run in runs if run.sequence in logits]
        asked = [self._how_to_sample(run, allowed.get(run.sequence)) for run in ours]
        tokens = choose_tokens([logits[run.sequence] for run in ours], asked) if ours else []
        chosen = {}
        for run, token in zip(ours, tokens, strict=True):
            if isinstance(token, Exception):
                log_fault(run.request.name, token)
            chosen[run.sequence] = as_numbers(token, most)
        shared = self.cache.share(chosen, width=2 + 2 * most)
        return [from_numbers(shared[run.sequence], run.request.params.top_n_logprobs) for run in runs]

    def _how_to_sample(self, run: _Running, allowed: Tensor | GrammarFault | None) -> Draw:
        """How the next token of a text is chosen."""
        request, rules = run.request, run.request.rules
        change = None
        if not rules.keep_logits(len(run.tokens) - len(request.tokens)):
            text = run.tokens[len(request.tokens) :]
            ends = self.tokenizer.ends if run.ends_at_end_token else frozenset()
            change = partial(change_logits, rules=rules, so_far=TextSoFar(request.tokens, text, ends, allowed))
        return Draw(request.params, request.seed, len(run.tokens), rules.min_p, change)

    def _append_token(self, run: _Running, token: Token | str) -> RequestOutput:
        """Append a token; or end the request, after its last token or an error."""
        if isinstance(token, str):
            return self._fail(run, token)
        if self.handed and run.request.handoff:
            return self._pin(run, self.handed)
        name, first = run.request.name, not run.chosen
        if first and any(math.isnan(token.logprob) for token in run.prompt):
            return self._fail(run, NAN)
        if not run.request.params.num_tokens_to_generate:
            self._retire(self.running.pop(name))
            return RequestOutput(name, (), "", "length", True, run.reused, prompt=tuple(run.prompt))
        run.tokens.append(token.id)
        run.chosen.append(token)
        try:
            text, finish = self._new_text(run, token)
        except Exception as error:
            log_fault(name, error)
            return self._fail(run, GRAMMAR if isinstance(error, GrammarFault) else MISTAKE)
        if finish:
            del self.running[name]
            self._retire(run)
        if not first:
            return RequestOutput(name, (token,), text, finish)
        return RequestOutput(name, (token,), text, finish, True, run.reused, prompt=tuple(run.prompt))

    def _pin(self, run: _Running, handed: HandedSequences) -> RequestOutput:
        """Keep a prefilled sequence in the cache until its release. Its first token is left to the decoder."""
        handed.finish_rows(run.request.handoff, run.sequence, run.cached)
        self.pinned[run.request.handoff] = self.running.pop(run.request.name)
        return RequestOutput(run.request.name)

    def _new_text(self, run: _Running, token: Token) -> tuple[str, str]:
        """The text that has become final with a token, and how the request ends, if it does."""
        if token.id in self.tokenizer.ends and run.ends_at_end_token:
            return run.stream.finish(), "stop"
        if run.matcher:
            run.matcher.advance(token.id)
        text = run.stream.push(token.id)
        if run.stream.stopped:
            return text + run.stream.finish(), "stop"
        if len(run.chosen) == run.request.params.num_tokens_to_generate:
            return text + run.stream.finish(), "length"
        return text, ""

    def _fail(self, run: _Running, why: str) -> RequestOutput:
        """End a request with an error. Its cached tokens are dropped, because they may be wrong too."""
        del self.running[run.request.name]
        if self.handed and run.request.handoff:
            self.handed.close(run.request.handoff, why)
        self._prefixes.remove(run.sequence)
        self.cache.free(run.sequence)
        return RequestOutput(run.request.name, finish="error", why=why)

    # -- room in the cache ----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start requests in order of arrival, while the cache has enough space to finish them.

        Behind one that does not fit, the next `OVERTAKE` may start. Then all wait until it has started.
        Twins start when their prompt is computed.
        """
        kept, large = list[_Waiting](), list[_Waiting]()
        while self.waiting and len(large) <= OVERTAKE and all(one.overtaken < OVERTAKE for one in large):
            waiting = self.waiting.popleft()
            if self._twin_is_computed_first(waiting.request, kept):
                kept.append(waiting)
            elif not self._start(waiting):
                kept.append(waiting)
                large.append(waiting)
            else:
                for one in large:
                    one.overtaken += 1
        self.waiting.extendleft(reversed(kept))

    def _twin_is_computed_first(self, request: Request, earlier: Sequence[_Waiting]) -> bool:
        """Whether the prompt of a request is that of an earlier one, which waits or is being computed."""
        if not request.twin or request.scored:
            return False
        run = self.running.get(request.twin)
        return bool(run and not run.chosen) or any(one.request.name == request.twin for one in earlier)

    def _start(self, waiting: _Waiting) -> bool:
        """Whether a request waits no longer: it runs, or has ended by an error."""
        request = waiting.request
        if (prefix := self._prefix_with_room(waiting)) is None:
            return False
        source, reused = prefix
        try:
            stop = request.params.stop_words or ()
            stream = TextStream(self.tokenizer.decode, stop, request.tokens, request.rules.min_tokens)
            matcher = self._grammars.matcher(request.rules.grammar) if request.rules.grammar else None
        except UsageError as error:
            self.refuse(request.name, str(error))
            return True
        except Exception as error:
            log_fault(request.name, error)
            self.refuse(request.name, MISTAKE)
            return True
        sequence = self._fork_or_reuse(source, reused)
        self.running[request.name] = _Running(request, sequence, [*request.tokens], reused, stream, reused, matcher)
        if self.handed and request.handoff:
            self.handed.open(request.handoff, len(request.tokens))
            self.handed.finish_rows(request.handoff, sequence, reused)
            self._ended.append(RequestOutput(request.name, finish="length", reused=reused))
        return True

    def _prefix_with_room(self, waiting: _Waiting) -> tuple[int | None, int] | None:
        """The cached sequence, if any, that a request continues, and how many of its tokens; None: there is no room."""
        request = waiting.request
        while True:
            source, reused = (self._may_share(request) and self._prefixes.longest(waiting.prompt)) or (None, 0)
            if source is not None and not self.cache.holds(source, reused):
                source, reused = None, 0
            copies = source is not None and self._reusable.get(source) != reused
            fits = self._make_room_for_request(self._rows_to_come(request, reused), source, copies)
            if source is not None and not self.cache.holds(source, reused):
                continue  # keys of the prefix were freed for this room
            if fits:
                return source, reused
            if self.running or source is None or source not in self._reusable:
                return None
            self._evict(source)  # its other pages take the space

    def _may_share(self, request: Request) -> bool:
        """Whether a prompt may begin with the keys of a cached sequence.

        Logits of all tokens need a pass over all. A decoder reads all keys, and those outside every window may be
        freed.
        """
        return not request.scored and not (request.handoff and self.cache.window is not None)

    def _fork_or_reuse(self, source: int | None, reused: int) -> int:
        """A sequence with the first tokens of a cached one, or that sequence itself if it has no others."""
        if source is None:
            return self.cache.open()
        if self._reusable.get(source) == reused:
            del self._reusable[source]
            return source
        if source in self._reusable:
            self._reusable.move_to_end(source)
        return self.cache.fork(source, reused)

    def _make_room_for_request(self, tokens: int, spare: int | None, copies: bool) -> bool:
        """Evict sequences until so many tokens fit besides the reserved ones, and copies if `spare` is forked within a
        page. Returns whether they fit."""
        needed = tokens + self.waste * copies
        needed += sum(self._rows_to_come(run.request, run.cached) for run in self.running.values())
        if self.running:  # a single sequence uses all pages; several may each leave some unfilled
            needed += self.waste * (len(self.running) + 1)
        return self._evict_until_fits(needed, copies, spare)

    def _rows_to_come(self, request: Request, cached: int) -> int:
        """How many rows a request with so many cached ones may still take at a time."""
        left = request.end - cached
        return left if request.handoff else min(left, self._most_rows(left))

    def _most_rows(self, tokens: int) -> int:
        """How many rows a text takes at a time: with windows those that are seen, a chunk, and partly used pages."""
        if self.cache.window is None:
            return tokens
        return min(tokens, self.cache.window + self.chunks.most + 2 * self.waste)

    def _trim(self) -> None:
        """Free keys outside every window. Prompts with a common prefix cannot share them any more."""
        if self.cache.window is not None:
            for sequence in self._reusable:
                self.cache.trim(sequence)
            for run in self.running.values():
                if not run.request.handoff:  # a decoder reads all keys
                    self.cache.trim(run.sequence)

    def _make_room_for_step(self, tokens: int) -> None:
        """Make room for a step's tokens. Without windows, `_admit` has done so."""
        if self.cache.window is not None:
            self._evict_until_fits(tokens + self.waste * (len(self.running) + 1), False)

    def _evict_until_fits(self, needed: int, copies: bool, spare: int | None = None) -> bool:
        """Free keys outside every window, and then the oldest sequences but `spare`, until so many tokens fit."""
        if not self._fits(needed, copies):
            self._trim()
        for oldest in [sequence for sequence in self._reusable if sequence != spare]:
            if self._fits(needed, copies):
                break
            self._evict(oldest)
        return self._fits(needed, copies)

    def _fits(self, tokens: int, copies: bool) -> bool:
        """Whether so many tokens fit; for copies, no rank may be full, however much space the others have."""
        return self.cache.room() >= tokens and (not copies or self.cache.can_copy())

    def _retire(self, run: _Running) -> None:
        """Keep the sequence of a request for requests with the same prefix."""
        if self.handed and run.request.handoff:
            self.handed.close(run.request.handoff, "its lease has ended")
        if not run.cached:
            self._prefixes.remove(run.sequence)
            self.cache.free(run.sequence)
            return
        self._reusable[run.sequence] = run.cached
        self._prefixes.add(run.sequence, run.request.key, run.tokens, run.cached)

    def _evict(self, sequence: int) -> None:
        del self._reusable[sequence]
        self._prefixes.remove(sequence)
        self.cache.free(sequence)


def _allowed(matcher: Matcher) -> Tensor | GrammarFault:
    try:
        return matcher.allowed()
    except GrammarFault as fault:
        return fault
