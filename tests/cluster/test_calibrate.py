"""Fitting a cluster: a fit finds the true fields, stays within bounds and reports how well it predicts other cells."""

import csv
import re
from dataclasses import replace

import pytest

from megatron.context_parallel import UsageError
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.fields import field_of, what_if, with_field
from megatron.context_parallel.cluster.search.calibrate import Calibration, Cell, Field
from megatron.context_parallel.commands.calibrate import main
from tests.support.box import BOX
from tools import make_presets_table

SIZES = (1.0, 2.0, 5.0, 20.0, 100.0)  # GB
FIELDS = {"nics.GB_s": Field(10, 2, 25), "iteration_ms": Field(100, 1, 1000)}


def predict(table, cluster, wanted):
    """The seconds of an iteration that only sends: a mock table of two columns."""
    for size in SIZES:
        for share in (1.0, 0.5):
            yield share * size / cluster.nics.GB_s + cluster.iteration_ms / 1e3


def cells(truth, fitted=(2.0, 20.0)):
    places = [(size, column) for size in SIZES for column in ("all", "half")]
    numbers = zip(places, predict("sent", truth, None), strict=True)
    return [Cell("sent", f"{size:g} GB", column, value, size in fitted) for (size, column), value in numbers]


TRUTH = replace(BOX, nics=replace(BOX.nics, GB_s=8.0), iteration_ms=300.0)


def test_a_fit_finds_what_made_the_numbers():
    fit = Calibration(BOX, FIELDS, cells(TRUTH), predict)
    assert fit.fitted.nics.GB_s == pytest.approx(8, rel=0.01)
    assert fit.fitted.iteration_ms == pytest.approx(300, rel=0.02)
    assert max(fit.errors(cells(TRUTH), fit.fitted).values()) < 0.01
    assert replace(fit.fitted, nics=BOX.nics, iteration_ms=0.0) == BOX


def test_cells_that_no_field_changes_do_not_hide_what_a_fit_still_gains():
    def and_constants(table, cluster, wanted):
        return [1.0] * 100 if table == "kept" else [*predict(table, cluster, wanted)]

    kept = [Cell("kept", f"{i}", "all", 3.0, True) for i in range(100)]
    fit = Calibration(BOX, FIELDS, [*cells(TRUTH), *kept], and_constants)
    assert fit.fitted == Calibration(BOX, FIELDS, cells(TRUTH), predict).fitted


def test_a_fit_stays_within_what_is_possible():
    fast = replace(TRUTH, nics=replace(TRUTH.nics, GB_s=80.0))
    assert Calibration(BOX, FIELDS, cells(fast), predict).fitted.nics.GB_s == pytest.approx(25, rel=1e-3)


def test_a_column_that_is_left_out_does_not_move_the_fit():
    """The column "half" is wrong by a factor of 2. Without it the fit is right."""
    wrong = [cell._replace(value=2 * cell.value) if cell.column == "half" else cell for cell in cells(TRUTH)]
    fit = Calibration(BOX, FIELDS, wrong, predict)
    without = fit.without([cell for cell in wrong if cell.column == "half"])
    right = [cell for cell in wrong if cell.column == "all"]
    assert sum(fit.errors(right, without).values()) < 0.5 * sum(fit.errors(right, fit.fitted).values())
    assert fit.without([]) is fit.fitted


def test_what_the_cells_do_not_tell_stays_where_it_starts():
    fields = FIELDS | {"inside.GB_s": Field(90, 10, 100)}
    assert Calibration(BOX, fields, cells(TRUTH), predict).fitted.inside.GB_s == pytest.approx(90, rel=1e-3)


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"nics.speed": Field(1, 1, 1)}, "speed: no such field"),
        ({"device.attention[7].forward_TFLOP_s": Field(0.5, 0.1, 1)}, r"attention\[7\].forward_TFLOP_s: no such field"),
        ({"nics.GB_s": Field(30, 2, 25)}, "starts at 30; give 0 < least <= start <= most"),
        ({"device.attention[0].forward_TFLOP_s": Field(1, 1, 2)}, "above the peak of the device; give at most 1"),
        ({f"device.attention[{i}].rows": Field(1, 1, 1) for i in range(17)}, "17 fields to fit; give at most 16"),
    ],
)
def test_a_fit_that_cannot_be_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        Calibration(BOX, fields, cells(TRUTH), predict)
    with pytest.raises(UsageError, match="no cell is marked as fitted"):
        Calibration(BOX, FIELDS, cells(TRUTH, fitted=()), predict)


def test_a_field_has_a_path():
    path = "device.attention[0].backward_TFLOP_s"
    changed = with_field(BOX, path, 0.5)
    assert (field_of(BOX, path), field_of(changed, path)) == (1, 0.5)
    assert with_field(changed, path, 1) == BOX


def test_what_if_a_field_had_another_value():
    cluster = load_cluster("dgx-h100")
    changed = what_if(cluster, "nics.GB_s=20,nodes=2,device.attention[0].forward_TFLOP_s=0.5")
    assert (changed.nics.GB_s, changed.nodes, changed.device.attention[0].forward_TFLOP_s) == (20, 2, 0.5)
    for wrong, message in (
        ("nics.GBs=20", "GBs: no such field"),
        ("nics.GB_s=fast", "--what-if nics.GB_s=fast: need a number, such as nics.GB_s=50"),
        ("nics.GB_s=-1", "--what-if nics.GB_s -1.0: need a number above 0"),
        ("name=box", "--what-if name=box: not a number in"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            what_if(cluster, wrong)


def test_the_page_has_the_presets_of_today():
    """Run tools/make_presets_table.py if this fails."""
    assert make_presets_table.BEGIN + make_presets_table.table() in make_presets_table.PAGE.read_text()


PREDICT = """
CLUSTER = {"table_1": "dgx-a100"}
FIELDS = {"dgx-a100": {"nics.GB_s": (25, 5, 25)}}
FITTED = {"table_1": lambda row, column: row == "1 GB"}

def predict(table, cluster, wanted):
    return [size / cluster.nics.GB_s for size in (1, 2)]
"""


def test_the_tool_writes_the_cluster_and_what_it_was_fitted_to(tmp_path, monkeypatch, capsys):
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "predict.py").write_text(PREDICT)
    with (tmp_path / "paper" / "table_1.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["row", "column", "unit", "paper"], ["1 GB", "time", "s", "0.1"], ["2 GB", "time", "s", "0.25"]]
        )
    monkeypatch.chdir(tmp_path)
    main(["paper", "--cluster", "dgx-a100", "--output", "fitted.yaml"])
    fitted = load_cluster("fitted.yaml")
    assert fitted.nics.GB_s == pytest.approx(10, rel=0.01)
    assert fitted.source.endswith("Fitted by tools/calibrate.py to table_1 (1 GB): nics.GB_s.")
    said = capsys.readouterr().out
    assert "20.0% / 20.0% (1)" in said and "wrote fitted.yaml" in said
    assert said.count("64.0% / 68.0% (2)") == 3  # the column or the table left out, and nothing fitted: 25 GB/s
    with pytest.raises(UsageError, match="--cluster dgx: not in its FIELDS; give one of dgx-a100"):
        main(["paper", "--cluster", "dgx", "--output", "fitted.yaml"])
    with pytest.raises(UsageError, match=r"DIR none: no predict\.py"):
        main(["none", "--cluster", "dgx-a100", "--output", "fitted.yaml"])
