"""Rows that pad the vocabulary change neither loss nor initial weights, and checkpoints load across paddings."""

import math
from argparse import Namespace

import pytest
import torch

from megatron.context_parallel.integration.vocabulary import draw_rows, leave_out_padding
from tests.support import training_case

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
STEPS, STOP = 3, 1
ROWS = "padded_vocab_size"  # of a vocabulary of 64


def losses(family: str, changes: dict) -> list[float]:
    return training_case.train(family, train_iters=STEPS, **changes).losses


@pytest.mark.parametrize(
    ("family", "world", "layout", "rows"),
    [
        ("llama", 1, {}, (64, 128, 1024)),
        (
            "llama",
            2,
            {TP: 2, "cross_entropy_chunk_size": 6},
            (66, 160),
        ),  # 33 rows on each rank; on the second rank padding alone
        ("gpt3", 4, {TP: 2, PP: 2, "sequence_parallel": True}, (66, 160)),  # tied
    ],
)
def test_padding_changes_no_loss_from_the_first_weights_on(ranks, family, world, layout, rows):
    first, *others = [ranks(world, losses, family, layout | {ROWS: number})[0] for number in rows]
    for other in others:
        assert other == pytest.approx(first, rel=1e-6)


def resume(directory: str, family: str, first: dict, then: dict) -> tuple[list[float], list[float]]:
    """Losses of an uninterrupted run, and those of one stopped at STOP and resumed as `then`, from there on."""
    whole = losses(family, first)
    training_case.train(family, train_iters=STEPS, exit_interval=STOP, save=directory, **first)
    return whole[STOP:], training_case.train(family, train_iters=STEPS, load=directory, **then).losses


SPREAD = {CP: 4, ROWS: 65}
SPLIT = {CP: 2, TP: 2, ROWS: 160}
REPLICATED = {"use_distributed_optimizer": False}


@pytest.mark.parametrize(
    ("family", "first", "then"),
    [
        ("llama", SPLIT | REPLICATED, SPREAD | REPLICATED),
        ("gpt3", SPREAD, {PP: 2, TP: 2, ROWS: 160}),
    ],
    ids=["from tp2, replicated", "tied, to pp2"],
)
def test_resume_with_another_padding(ranks, tmp_path, family, first, then):
    for whole, resumed in ranks(4, resume, str(tmp_path), family, first, then):
        assert resumed == pytest.approx(whole, rel=1e-6)


def padded_rows(rows: int) -> tuple[float, float, int]:
    """After some steps: the largest weight and first moment of padded rows, and how many they are."""
    args = training_case.case_args("llama", padded_vocab_size=rows, train_iters=STEPS, cross_entropy_chunk_size=6)
    with training_case.groups(args):
        state = training_case.build(args)
        data = [training_case.batches(args, 0)]
        training_case.training.train_loop(args, state, training_case.Recorder(), data, None, 0.0)
        gpt = state.model[0].module
        tables = [gpt.embedding.word_embeddings.weight, gpt.output_layer.weight]
        padding = torch.cat([table[args.vocabulary :] for table in tables])
        gradients = torch.cat([table.main_grad[args.vocabulary :] for table in tables])
        return padding.abs().max().item(), gradients.abs().max().item(), len(padding)


def test_padded_rows_get_no_gradient(ranks):
    assert ranks(1, padded_rows, 128) == [(0.0, 0.0, 128)]


class OutputLayer(torch.nn.Module):
    """Logits of 1 for 40 rows, split over two ranks or gathered."""

    def __init__(self, rank: int, gathered: bool) -> None:
        super().__init__()
        self.output_size, self.columns = 40, 40 if gathered else 20
        self.tp_group = Namespace(rank=lambda: rank)

    def forward(self) -> tuple[torch.Tensor, None]:
        return torch.ones(2, 3, self.columns), None


@pytest.mark.parametrize(("rank", "gathered", "real"), [(0, False, 20), (1, False, 5), (0, True, 25), (1, True, 25)])
def test_logits_of_padding(rank, gathered, real):
    layer = OutputLayer(rank, gathered)
    leave_out_padding(Namespace(post_process=True, output_layer=layer), 25)
    logits, _ = layer()
    assert (logits[..., :real] == 1).all() and (logits[..., real:] == -math.inf).all()


def test_rows_depend_on_their_number_alone():
    whole = torch.empty(700, 8)
    draw_rows(whole, 0, 600, 0.5, "seed")
    assert not whole[600:].any() and len(whole[:600].unique(dim=0)) == 600
    assert whole[:600].std() == pytest.approx(0.5, rel=0.05) and abs(whole[:600].mean()) < 0.05
    for first, count in ((0, 256), (255, 3), (300, 400), (640, 60)):
        part = torch.empty(count, 8)
        draw_rows(part, first, 600, 0.5, "seed")
        assert torch.equal(part, whole[first : first + count])
    other = torch.empty(700, 8)
    draw_rows(other, 0, 600, 0.5, "another seed")
    assert not torch.isclose(other[:600], whole[:600]).all(dim=1).any()
