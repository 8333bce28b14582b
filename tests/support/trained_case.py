"""A tiny Llama trained on the pages of docs/, and what it says by megatron-core's own attention."""

import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron.context_parallel import ContextParallel
from megatron.context_parallel.generation.flags import Source
from megatron.context_parallel.generation.load_model import load_model
from megatron.context_parallel.generation.model_source import model_arguments
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.trainer import training
from megatron.context_parallel.trainer.checkpoint.save_load import Save
from megatron.context_parallel.trainer.data.batches import collate
from megatron.context_parallel.trainer.model.build import transformer_config
from megatron.context_parallel.trainer.setup import initialize_model_parallel
from tests.support import session_case, training_case

LETTERS, SEQUENCE, STEPS = 128, 96, 120
TURNS, NEW = (
    [[41, 1, 23, 9], [7, 30, 0, 2], [1, 12, 5, 3]],
    64,
)  # letters of each sequence; of an answer


def pages() -> list[int]:
    """The text: ASCII alone, a token for each character."""
    folder = Path(__file__).parents[2] / "docs"
    text = "".join(page.read_text() for page in sorted(folder.glob("*.md")))
    return [*text.encode("ascii", "ignore")]


def prompts(turn: int, lengths: list[int]) -> list[list[int]]:
    """What a user says in a turn: parts of the text."""
    text, draw = pages(), torch.Generator().manual_seed(turn)
    starts = torch.randint(len(text) - 100, (len(lengths),), generator=draw).tolist()
    return [text[start : start + count] for start, count in zip(starts, lengths, strict=True)]


def batches(args: Namespace) -> Iterator[dict[str, torch.Tensor]]:
    text, draw = torch.tensor(pages()), torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(text) - SEQUENCE - 1, (args.micro_batch_size,), generator=draw)
        parts = [text[start : start + SEQUENCE + 1] for start in starts.tolist()]
        at, mask = torch.arange(SEQUENCE), torch.ones(SEQUENCE)
        yield collate([{"tokens": x[:-1], "labels": x[1:], "loss_mask": mask, "position_ids": at} for x in parts], None)


def train(folder: str) -> list[float]:
    """Train on this rank alone and save as the trainer does; the loss of each step."""
    args = training_case.case_args(
        "llama",
        **{"save": folder, "train_iters": STEPS, "lr_decay_iters": STEPS, "micro_batch_size": 4},
        **{"seq_length": SEQUENCE, "max_position_embeddings": 1024, "transformer_impl": "local"},
        **{"vocabulary": LETTERS, "padded_vocab_size": LETTERS, "vocab_size": LETTERS - 1},
        **{"tokenizer_type": "NullTokenizer", "cp_layout": "contiguous"},
    )
    with training_case.groups(args):
        state, recorder = training_case.build(args), training_case.Recorder()
        training.train_loop(args, state, recorder, [batches(args)], None, time.monotonic())
        Save(args, state).finish()
    return recorder.losses


def load(folder: str) -> tuple[ContextParallel, GPTModel]:
    """The trained model over the ranks of this world; call `parallel_state.destroy_model_parallel` after use."""
    args = model_arguments(Source(load=folder))
    initialize_model_parallel(args)
    cp = ContextParallel(args.cp_layers[0], group=parallel_state.get_context_parallel_group())
    return cp, load_model(args, cp)


def plain_model(folder: str) -> GPTModel:
    """The same weights with megatron-core's own attention, on this rank alone; destroy its groups after use."""
    args = model_arguments(Source(load=folder))
    _, ours = load(folder)
    config = transformer_config(args)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    rope = {"position_embedding_type": "rope", "rotary_base": args.rotary_base}
    untied = {"share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights}
    whole = GPTModel(config, spec, LETTERS, 1024, parallel_output=False, **rope, **untied)
    whole.rotary_pos_emb.cp_group = None
    missing, unknown = whole.load_state_dict(ours.state_dict(), strict=False)
    assert not unknown and not [name for name in missing if "_extra_state" not in name]
    return whole.eval()


def from_the_start(folder: str, new: int = NEW) -> list[list[int]]:
    """The whole conversations, each token computed from the start by megatron-core's own attention."""
    texts = session_case.answer_from_the_start(plain_model(folder), prompts, TURNS, new)
    parallel_state.destroy_model_parallel()
    return texts


def over_the_cache(folder: str, how: list[dict], new: int = NEW) -> list[list[list[int]]]:
    """The same over the cache of this world's ranks, in some ways."""
    cp, model = load(folder)
    found = []
    for case in how:
        of = Session(model, cp, cache_tokens=1600, page=8, prefill=case.get("prefill", "auto"))
        session_case.poison(of)
        ways = {name: value for name, value in case.items() if name != "prefill"}
        found.append(session_case.greedy(of, TURNS, new, say=prompts, **ways))
    parallel_state.destroy_model_parallel()
    return found


def _logits_of(session: Session, sequence: int, given: dict[int, list[int]]) -> torch.Tensor:
    """The logits of one of the sequences of a pass, on every rank."""
    rows = {other: row.tolist() for other, row in session.forward(given).items()}
    return torch.tensor(session.share(rows, LETTERS)[sequence])


def among_others(folder: str, steps: int = NEW) -> float:
    """The largest relative difference of a conversation's logits among others that come and go, from those alone."""
    cp, model = load(folder)
    alone, among = (Session(model, cp, cache_tokens=1600, page=8) for _ in range(2))
    tokens = prompts(0, TURNS[0])[0]
    one, two, others, worst = alone.open(), among.open(), list[int](), 0.0
    for step in range(steps):
        if step % 3 == 0:
            others.append(among.open())
        if step % 5 == 4:
            among.free(others.pop(0))
            session_case.poison(among)
        new = {other: [step % LETTERS] * (1 if among.length(other) else 17) for other in others}
        expected = _logits_of(alone, one, {one: tokens})
        found = _logits_of(among, two, {two: tokens, **new})
        worst = max(worst, float((found - expected).norm() / expected.norm()))
        assert int(found.argmax()) == int(expected.argmax()), step
        tokens = [int(expected.argmax())]
    parallel_state.destroy_model_parallel()
    return worst
