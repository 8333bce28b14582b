"""Predicted times of packed documents against closed forms, and the choice that the trainer makes of them."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.search.documents import DocumentsChoice, DocumentsSearch, search_documents
from megatron.context_parallel.cluster.search.plainness import SURE
from megatron.context_parallel.cluster.simulate.one_pass import simulate
from megatron.context_parallel.cluster.step.documents_time import documents_forecast
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.commands.plan_documents import draw_lengths, end_to_end
from megatron.context_parallel.plan.row_sets import MetRows, RowSets
from megatron.context_parallel.plan.volume import Shape
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.slices import Slices
from megatron.context_parallel.trainer.arguments import auto
from megatron.context_parallel.trainer.arguments.auto import choose_strategy
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.data.batches import SAMPLED, document_options
from megatron.context_parallel.trainer.dry_run import describe
from tests.support.box import BOX, BOX_TEXT

MODEL = ModelShape(
    num_layers=1,
    hidden_size=1,
    ffn_hidden_size=1,
    num_attention_heads=1,
    num_query_groups=1,
    kv_channels=64,
    padded_vocab_size=1,
)
PAIR = 4 * 64 / 1e12  # seconds of a visible pair in a forward pass
ROW = 2 * 64 * 2  # bytes of the keys and values of a row
TWO = BOX.part(2)


def run(n: int, tokens: int, spec: str = "direct") -> TrainConfig:
    return TrainConfig(seq_length=tokens, context_parallel_size=n, cp_strategy=spec)


def test_a_static_layout_has_uneven_work_and_sends_rows_that_are_needed():
    # Rank 1 has rows 16 to 47 of a document of 48: 528 pairs with its own keys, and 32 x 16 with those of rank 0.
    found = documents_forecast(MODEL, run(2, 64), TWO, end_to_end(np.array([48, 16]), 64), False)
    work, received, _ = found
    assert work == pytest.approx(1040 / ((1040 + 136 + 136) / 2))
    assert received == 2 * 16 * ROW  # in both passes
    assert 16 * ROW / 100e9 < 2.5 * 528 * PAIR / 4  # a quarter of its own pair hides them in the backward pass
    assert found.seconds == pytest.approx(3.5 * 1040 * PAIR, rel=1e-3)


def test_a_merge_takes_the_rows_that_arrive():
    """Rank 1 returns the gradients of 16 of the 32 rows of keys of rank 0."""
    chunks = Chunks.pair("contiguous", 2, 64)
    mask = Mask(True, documents=end_to_end(np.array([16, 32, 16]), 64))
    slow = replace(TWO, device=replace(TWO.device, memory_GB_s=1e-3))
    plan = parse_spec("direct").plan(2, visible_pairs=mask.pairs(*chunks), backward=True, heads=1, kv_heads=1)
    slices = Slices.of(chunks[0])

    def seconds(rows: RowSets | None) -> float:
        return simulate(plan, slow, Shape(32, 1, 1, 64, 2), mask, blocks=lambda block: 0.0, rows=rows).seconds

    whole = 3 * (4 * 32 * 2 * 64) / 1e6  # reads two partials of keys and values, and writes one
    assert seconds(None) - seconds(RowSets(plan, MetRows(mask, slices, slices))) == pytest.approx(whole / 2, rel=1e-3)


@pytest.mark.parametrize("samples", [1, 2])
def test_placed_documents_stay_whole(samples):
    documents = Documents.packed(torch.tensor([0, *[32] * (2 * samples)]).cumsum(0), 64, samples=samples)
    of_samples = replace(run(2, 64), micro_batch_size=samples, global_batch_size=samples)
    found = documents_forecast(MODEL, of_samples, TWO, documents, True)
    assert found[:2] == (1.0, 0)
    assert found.seconds == pytest.approx(3.5 * samples * 528 * PAIR, rel=1e-3)
    static = documents_forecast(MODEL, of_samples, TWO, documents, False)
    assert static.seconds == pytest.approx(3.5 * samples * 528 * PAIR + samples * 2 * 16 * ROW / 100e9, rel=0.2)


def test_a_placement_must_save_more_than_predictions_are_off():
    static, placed = DocumentsChoice("mesh", False), DocumentsChoice("direct", True)
    for saved, best in ((SURE / 2, static), (2 * SURE, placed)):
        found = DocumentsSearch({placed: 1 - saved, static: 1.0}, 3)
        assert found.best == best
        if best == static:
            assert found.headline.endswith(
                "the plainest of 1 without placements; --cp-strategy direct --cp-place-documents takes 985 ms"
            )
    said = found.headline
    assert "chose --cp-strategy direct --cp-place-documents; predicted for the documents of 3 micro batches: " in said
    assert said.endswith(
        "940 ms of attention per layer and micro batch, the fastest of 2; --cp-strategy mesh takes 1000 ms"
    )
    assert DocumentsSearch({placed: 1.0}, 3).best == placed
    near = DocumentsSearch({DocumentsChoice("direct", False): 0.98, DocumentsChoice("ring", False): 1.0}, 3)
    assert near.best == DocumentsChoice("ring", False)
    assert near.headline.endswith("the plainest of 2 within 3% of the fastest, --cp-strategy direct")


def test_documents_decide():
    """Documents of any length are placed; for a single one the zigzag of a ring is as good."""
    slow = replace(BOX, nodes=8, devices_per_node=1, inside=None, nics=replace(BOX.nics, per_node=1, GB_s=5))
    tokens = 8 * 2048
    drawn = end_to_end(draw_lengths(300, 1.2, tokens, np.random.default_rng(0)), tokens)
    how = (MODEL, run(8, tokens), slow, ["ring", "mesh:layout=cyclic"])
    one = end_to_end(np.array([tokens]), tokens)
    for documents, best in ((drawn, DocumentsChoice("direct", True)), (one, DocumentsChoice("ring", False))):
        found = search_documents(*how, [documents], {}, room=1e12)
        assert found.best == best
        assert [*found.seconds.values()] == sorted(found.seconds.values())
    only = search_documents(*how, [drawn], {}, room=1e12, placing=[True]).seconds
    assert {choice.spec for choice in only} == {"ring", "direct"}  # a placement replaces the layout of mesh
    assert all(choice.placed for choice in only)


TRAINER = (
    "--preset tiny-llama --micro-batch-size 1 --dry-run --context-parallel-size 4 --cp-strategy auto "
    "--seq-length 16384 --mock-data --reset-attention-mask --bf16"
)


def _chosen(flags: str, measured: str) -> tuple:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "4")
        patch.setattr(auto, "measured", lambda workload, group: load_cluster(measured))
        args = parse_args(flags.split())
        lengths = torch.tensor([0, 9000, *[700] * 10]).cumsum(0)
        args = choose_strategy(args, [Documents.packed(lengths, 16384)])
    costs = document_options(args)["place"].keywords["costs"]
    return args.cp_layers[0].spec, args.cp_place_documents, costs.row_inside


def test_the_trainer_takes_a_placement_where_it_wins(ranks, tmp_path):
    """It is made for the rates of the cluster that is named, or else measured."""
    path = tmp_path / "box.yaml"
    path.write_text(BOX_TEXT.replace("memory_GiB: 1,", "memory_GiB: 9,").replace("GB_s: 100", "GB_s: 0.5"))
    row = 2 * 2 * 2 * 16 * 2 / 0.5e9  # seconds: keys and values of 2 heads of 16 in bf16, in both passes
    for flags in (f"{TRAINER} --cp-cluster {path}", TRAINER):
        assert ranks(4, _chosen, flags, str(path)) == [("direct", True, pytest.approx(row))] * 4


def test_a_placement_counts_the_window_of_each_layer():
    flags = f"{TRAINER} --cp-place-documents --window-size 512,0".replace("auto", "direct")
    found = {}
    for more in ("", " --window-attn-skip-freq 2"):
        args = parse_args(f"{flags}{more}".split())
        found[more] = document_options(args)["place"].keywords["windows"]
    assert [*found.values()] == [[(512, 0)], args.num_layers // 2 * [(512, 0), (-1, -1)]]


def test_a_dry_run_says_what_a_placement_gains(capsys):
    describe(parse_args(f"{TRAINER} --cp-cluster dgx-h100".split()))
    said = " ".join(capsys.readouterr().out.split())
    flags, best, of_other = re.search(
        r"auto: chose --cp-strategy (.*?); predicted .*?: (\S+) ms .* takes (\S+) ms", said
    ).groups()
    assert f"documents of {SAMPLED} micro batches, attention of a layer, predicted for dgx-h100" in said
    rows = re.findall(r"(\S+), (zigzag|cyclic|contiguous|placed) ([\d.]+) x the mean [\d.]+ [KM]iB ([\d.]+) ms", said)
    (_, static, static_work, static_ms), (_, placed, work, placed_ms) = rows
    assert (static, placed) == (parse_spec(flags.split()[0]).layout, "placed")
    assert 1 <= float(static_work) < 1.1 and 1 <= float(work) < 1.1  # lengths of mock data are uniform
    assert (static_ms, placed_ms) == (best, of_other)
