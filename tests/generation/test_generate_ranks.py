"""Generation on several ranks gives the texts of transformers while requests join, wait, are cancelled or resume."""

import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.sampling_params import SamplingParams

from megatron.context_parallel import ContextParallel, UsageError
from megatron.context_parallel.generation import cache_size, generator
from megatron.context_parallel.generation.flags import CacheFlags, Source
from megatron.context_parallel.generation.generator import build_engine, text_tokenizer
from megatron.context_parallel.generation.load_model import load_model
from megatron.context_parallel.generation.model_source import model_arguments
from megatron.context_parallel.inference.engine import Engine, Request
from megatron.context_parallel.inference.pages import PageTables
from megatron.context_parallel.inference.rank_loop import RankLoop
from megatron.context_parallel.inference.rules import Rules
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.inference.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from megatron.context_parallel.trainer.checkpoint.save_load import Save
from megatron.context_parallel.trainer.setup import initialize_model_parallel
from tests.support import chat_case, llama_case, session_case, training_case
from tests.support.plain_session import PlainSession

VOCABULARY = 259
RULES = Rules(
    min_tokens=5,
    presence_penalty=1.2,
    frequency_penalty=0.7,
    repetition_penalty=1.3,
    min_p=0.02,
    logit_bias=((7, 3.0),),
)


def prompt(length: int, seed: int = 0) -> list[int]:
    numbers = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return [1, *numbers.tolist()]


def request(name: str, tokens: list[int], new: int, **params) -> Request:
    return Request(name, tokens, SamplingParams(num_tokens_to_generate=new, **params), seed=5)


def generate(folder: str, tensor: int, joining: dict[int, list[Request]], cancelled: dict[int, str], **flags) -> tuple:
    """Tokens and reused tokens of each request, which joins at its turn, and the variants of the passes."""
    args = model_arguments(Source(load=folder, tensor_model_parallel_size=tensor))
    initialize_model_parallel(args)
    engine = build_engine(args, CacheFlags(**flags))
    loop, found, reused, variants = RankLoop(engine), {}, {}, set()
    if dist.get_rank():
        loop.follow()
    else:
        for turn in range(1000):
            if engine.idle and turn > max(joining):
                break
            for output in loop.turn(joining.get(turn, ()), [cancelled[turn]] if turn in cancelled else ()):
                found.setdefault(output.request, []).extend(token.id for token in output.tokens)
                reused.setdefault(output.request, output.reused)
                if output.prompt:
                    found[f"{output.request}'s prompt"] = [(token.logprob, token.top) for token in output.prompt]
            variants.add(engine.cache.variant)
        loop.end()
    parallel_state.destroy_model_parallel()
    return found, reused, variants


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A HuggingFace folder with a tokenizer, and its model in transformers."""
    folder = tmp_path_factory.mktemp("llama")
    model = llama_case.save_llama(folder, "llama3", vocab_size=VOCABULARY)
    llama_case.save_tokenizer(folder, chat=True)
    return folder, model


def expected(model, asked: Request) -> list[int]:
    (whole,) = model.generate(
        torch.tensor([asked.tokens]),
        do_sample=False,
        max_new_tokens=asked.params.num_tokens_to_generate,
        eos_token_id=[2],
        pad_token_id=0,
    )
    return whole[len(asked.tokens) :].tolist()


def test_texts_on_ranks_are_those_of_transformers(ranks, llama):
    folder, model = llama
    greedy = [request(f"{i}", prompt(n, i), 6, top_k=1) for i, n in enumerate((120, 1, 40, 77))]
    answers = {asked.name: expected(model, asked) for asked in greedy}
    again = request("again", [*greedy[0].tokens, *answers["0"], *prompt(5, 9)], 6, top_k=1)
    drawn = request("drawn", prompt(30, 7), 9, temperature=1.3, top_p=0.9)
    answers["again"] = expected(model, again)
    joining = {0: greedy[:1], 1: greedy[1:3], 4: [greedy[3], drawn, request("gone", prompt(60, 8), 90)], 30: [again]}
    ruled = replace(request("ruled", prompt(25, 3), 12, temperature=0.9), rules=RULES)
    scored = replace(request("scored", prompt(90, 4), 2, top_n_logprobs=2), scored=True)
    joining[1] += [ruled, scored]
    logprobs = model(torch.tensor([scored.tokens])).logits[0].double().log_softmax(-1)
    ((alone, _, _),) = ranks(1, generate, str(folder), 1, {0: [drawn], 20: [ruled]}, {})
    draws = [alone["drawn"]]
    for n, tensor, flags in (
        (3, 1, {"cp_prefill": "pass-kv", "cache_tokens": 4096, "inference_dynamic_batching_max_tokens": 47}),
        (4, 2, {"cp_prefill": "pass-q", "cache_tokens": 512}),
    ):
        found, reused, variants = ranks(n, partial(generate, **flags), str(folder), tensor, joining, {9: "gone"})[0]
        assert {name: found[name] for name in answers} == answers, (n, flags)
        if flags["cache_tokens"] == 4096:  # in the small cache other texts evicted the first one
            assert reused["again"] == len(greedy[0].tokens) + len(answers["0"]) - 1
        assert len(found["gone"]) < 10 and flags["cp_prefill"] in variants
        draws.append(found["drawn"])
        assert found["ruled"] == alone["ruled"]
        for place, (logprob, top) in enumerate(found["scored's prompt"]):
            assert logprob == pytest.approx(logprobs[place, scored.tokens[place + 1]].item(), abs=1e-5)
            assert [value for _, value in top] == pytest.approx(logprobs[place].topk(2).values.tolist(), abs=1e-5)
    assert draws[0] == draws[1] == draws[2] and len({*draws[0]}) > 4


def test_grammars_hold_on_every_number_of_ranks(ranks, llama):
    pytest.importorskip("llguidance")
    lark = json.dumps({"grammars": [{"lark_grammar": 'start: /[a-f]{3,5}/ ("-" /[0-9]{2}/)+ "!"'}]})
    asked = [replace(request(f"{i}", prompt(9 + i, i), 40), seed=i, rules=Rules(grammar=lark)) for i in range(4)]
    found = [ranks(n, generate, str(llama[0]), 1, {0: asked[:3], 3: asked[3:]}, {})[0][0] for n in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    tokenizer = HuggingFaceTokenizer(str(llama[0]), special=True)
    for tokens in found[0].values():
        text = tokenizer.decode(tokens)
        whole = re.fullmatch(r"[a-f]{3,5}(-[0-9]{2})+!", text)
        assert whole if tokens[-1] == 2 else re.match(r"[a-f]{3,5}(-[0-9]{2})*", text), text


class Fragile(ByteTokenizer):
    def decode(self, tokens: list[int]) -> str:
        if tokens[-1] == 28:
            raise LookupError("no text")
        return super().decode(tokens)


def texts_among_faults(asked: list[Request]) -> tuple[dict[str, list], bool]:
    """The tokens and the end of each request on rank 0, and whether all pages of this rank are free after them."""
    session_case.start()
    session = session_case.session(cache_tokens=400)
    engine = Engine(session, Fragile(29), chunks=7, waste=session.tables.n * session.tables.page)
    loop, found = RankLoop(engine), {}
    if dist.get_rank():
        loop.follow()
    else:
        arriving = asked
        while arriving or not engine.idle:
            for output in loop.turn(arriving):
                found.setdefault(output.request, []).extend([token.id for token in output.tokens])
                found[output.request] += [output.finish] if output.finish else []
            arriving = []
        loop.end()
    engine.forget()
    return found, session.room() == engine.capacity


def test_errors_of_requests_end_them_on_all_ranks_alone(ranks):
    good = [request(f"good{i}", [3 + i] * (9 + i), 7, temperature=0.5, top_k=27) for i in range(3)]
    bad = [
        request("in sampling", [5] * 4, 7, top_k="many"),  # known to the rank with its logits
        request("in sampling later", [5, 6], 7, temperature="warm", top_k=5),
        request("in its prompt", [5] * 20 + [28], 7, top_k=1),
    ]
    (alone, _), *_ = ranks(1, texts_among_faults, good)
    (among, _), *others = everywhere = ranks(3, texts_among_faults, [bad[0], good[0], *bad[1:], *good[1:]])
    assert {asked.name: among.pop(asked.name) for asked in good} == alone and len(others) == 2
    assert among == {asked.name: ["error"] for asked in bad}
    assert all(free for _, free in everywhere)


class Tables:
    """A session's pages without its tensors: a token more than fits is an error of the page tables."""

    vocabulary = 257

    def __init__(self, n: int, pages: int, window: int | None = None) -> None:
        self.tables, self.window = PageTables(n, pages, 4, window), window
        self.room, self.can_copy, self.holds = self.tables.room, self.tables.can_copy, self.tables.holds
        self.open, self.free, self.trim = self.tables.open, self.tables.free, self.tables.trim

    def fork(self, sequence: int, tokens: int) -> int:
        return self.tables.fork(sequence, tokens)[0]

    def forward(self, new, scored):
        assert all(self.tables.holds(sequence, self.tables.length(sequence)) for sequence in new)
        self.tables.add({sequence: len(tokens) for sequence, tokens in new.items()})
        return {sequence: torch.eye(257)[(tokens[-1] * 7 + 3) % 256] for sequence, tokens in new.items()}

    def share(self, values, width):
        return values


@pytest.mark.parametrize(("n", "pages", "window"), [(1, 30, None), (3, 9, None), (4, 20, None), (3, 20, 7), (1, 30, 9)])
def test_what_was_admitted_always_fits(n, pages, window):
    draw = torch.Generator().manual_seed(n)

    def number(most: int) -> int:
        return int(torch.randint(most, (1,), generator=draw))

    cache = Tables(n, pages, window)
    length = 3 * n * pages * 4 if window else None  # with windows, requests may be longer than the cache
    engine = Engine(cache, ByteTokenizer(256), 9, length, n * 4)
    most, prompts, ended = engine.length, [[3] * 20, [4] * 33], 0
    for turn in range(5000):
        if turn > 300 and engine.idle:
            break
        if number(3) == 0 and turn < 300:
            start = prompts[number(len(prompts))]
            tokens = [*start[: number(len(start) + 1)], *(number(256) for _ in range(1 + number(12)))][: most - 30]
            prompts.append(tokens)
            engine.add(request(str(turn), tokens, 1 + number(29), top_k=1))
        if number(20) == 0 and engine.running:
            engine.cancel(next(iter(engine.running)))
        ended += sum(bool(output.finish) for output in engine.step())
    assert engine.idle and ended > 60
    engine.forget()
    assert engine.cache.room() == engine.capacity
    whole = request("whole", [5] * (most - 1), 1, top_k=1)
    engine.add(whole)
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    assert most == (length or n * pages * 4) and all(output.finish != "error" for output in outputs)


def test_a_prompt_is_not_forked_on_a_full_rank():
    """One rank has no page for a copy of the last page, and the other one has space for the whole prompt."""
    cache = Tables(2, 10)
    engine = Engine(cache, ByteTokenizer(256), waste=8)
    prompt = [*range(20)]
    engine.add(request("first", prompt, 1, top_k=1))
    engine.step()
    cache.tables._place_rows(cache.open(), [28, 0])
    assert cache.room() == 28 and not cache.can_copy()
    engine.add(request("second", [*prompt[:17], 99], 1, top_k=1))
    (output,) = engine.step()
    assert output.finish == "length" and output.reused == 0


def test_the_tokenizer_of_a_folder(llama):
    tokenizer = HuggingFaceTokenizer(str(llama[0]), special=True)
    text = "  Größe \n x"
    assert tokenizer.encode(text) == [1, *HuggingFaceTokenizer(str(llama[0]), special=False).encode(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.ends == {2} and tokenizer.has_chat
    said = [{"role": "user", "content": "hi"}]
    assert tokenizer.chat(said) == tokenizer.encode("[user]hi[assistant]")
    with pytest.raises(UsageError, match="no system messages"):
        tokenizer.chat([{"role": "system", "content": "be"}])


def test_texts_end_where_the_tokenizer_says_too(tmp_path, capsys):
    """As after a training that gave a base model a new end token: generation_config.json has the old one."""
    chat_case.tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    made = HuggingFaceTokenizer(str(tmp_path), special=True)
    start, end = made.of_transformers.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert made.ends == {7, end} and made.missing_end() is None
    (tmp_path / "chat_template.jinja").write_text(chat_case.CHATML.replace("<|im_end|>", "<|im_start|>"))
    other = HuggingFaceTokenizer(str(tmp_path), special=True)
    assert other.missing_end() == start
    of_chats = HuggingFaceTokenizer(str(tmp_path), special=True, chats=True)
    assert of_chats.ends == {7, start, end} and of_chats.missing_end() is None
    args = SimpleNamespace(load="there")
    for tokenizer in (made, other, ByteTokenizer(256)):
        generator._warn_of_missing_end(args, tokenizer)
    assert capsys.readouterr().err == (
        "warning: --load there: its chat template writes '<|im_start|>' after an answer, which ends no text; "
        f"add {start} to eos_token_id in generation_config.json\n"
    )


def test_the_size_of_a_cache(llama, capsys, monkeypatch):
    args = model_arguments(Source(load=str(llama[0]), bf16=True))
    monkeypatch.setattr(cache_size, "_memory_of_a_rank", lambda: 1_000_000)
    cache_size.describe(args, 1024)
    # 2 layers of 2 key/value heads of 16; embedding, output layer and layers with 8 projections and norms.
    weights = 2 * (2 * VOCABULARY * 32 + 2 * (32 * 64 * 2 + 32 * 32 * 2 + 3 * 32 * 56 + 2 * 32) + 32)
    assert cache_size.bytes_of_a_token(args) == 2 * 2 * 2 * 16 * 2
    assert f"tokens that fit: {(1_000_000 - weights) // 256};" in capsys.readouterr().out


def tokens_of(engine: Engine, steps: int) -> list[int]:
    """The tokens of all requests in some steps of an engine."""
    found = []
    for _ in range(steps):
        found += [token.id for output in engine.step() for token in output.tokens]
    return found


def save_and_generate(family: str, folder: str, tokens: list[int]) -> list[int]:
    """Save fresh weights as training does; the text of megatron-core's forward pass over the whole sequence."""
    args = training_case.case_args(
        family,
        save=folder,
        cp_layout="contiguous",
        tokenizer_type="NullTokenizer",
        vocab_size=training_case.VOCABULARY - 1,
        transformer_impl="local",
    )
    with training_case.groups(args):
        state = training_case.build(args)
        Save(args, state).finish()
        session = PlainSession(state.model[0].module, 100, training_case.VOCABULARY)
        engine = Engine(session, ByteTokenizer(256))
        engine.add(request("0", tokens, 12))
        return tokens_of(engine, 12)


def load_and_generate(folder: str, tensor: int, tokens: list[int]) -> list[int]:
    args = model_arguments(Source(load=folder, tensor_model_parallel_size=tensor))
    initialize_model_parallel(args)
    cp = ContextParallel(args.cp_layers[0], group=parallel_state.get_context_parallel_group())
    engine = Engine(Session(load_model(args, cp), cp, cache_tokens=256), ByteTokenizer(256), chunks=7)
    engine.add(request("0", tokens, 12))
    found = tokens_of(engine, 16)
    parallel_state.destroy_model_parallel()
    with pytest.raises(UsageError, match="NullTokenizer, which has no text"):
        text_tokenizer(args)
    return found


@pytest.mark.parametrize(("family", "tensor"), [("gpt3", 1), ("sinks", 2)])
def test_checkpoints_of_the_trainer(ranks, tmp_path, family, tensor):
    tokens = [5, 60, 33, 1, 8, 20, 9, 44, 3, 17]
    (expected,) = ranks(1, save_and_generate, family, str(tmp_path), tokens)
    assert len({*expected}) > 3
    for found in ranks(2, load_and_generate, str(tmp_path), tensor, tokens):
        assert found == expected


def test_a_checkpoint_that_is_not_there_is_told(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(UsageError, match="iter_0000007 is missing; no other checkpoint in it is complete"):
        model_arguments(Source(load=str(tmp_path)))
