"""The papers' tables: their cells, the files that are written, and the commands that measure."""

import csv
import json
import os
import shlex
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import attention_time
from examples.paper_tables import drawing, measure, mlperf_table, nemo_table, predictions, tables, testbeds
from examples.paper_tables.cells import (
    COLUMNS,
    HERE,
    PAPERS,
    ROOT,
    Cell,
    Result,
    read_cells,
    read_results,
    results_file,
    tables_of,
)
from examples.paper_tables.commands import attention_command, inference_command, training_command
from examples.paper_tables.constants import by_hand, fitted
from examples.paper_tables.contradictions import contradictions
from examples.paper_tables.drawing import digest
from examples.paper_tables.judged import CHOICES, Errors, as_printed, regret
from examples.paper_tables.measure import changed
from examples.paper_tables.measured import measured
from examples.paper_tables.mesh_attention import predict
from examples.paper_tables.reproduction import PICTURES, drawn, left_out_table
from examples.paper_tables.simulate import table_name
from megatron.context_parallel import UsageError
from megatron.context_parallel.trainer.log import Record, line_of

CELLS = {  # numeric cells, and of them those that are withheld
    "attention2d": {"figure_4": (5, 0), "figure_5": (2, 0), "figure_6": (2, 0)},
    "lightseq": {"table_1": (96, 0), "table_2": (12, 0), "table_3": (18, 0), "table_4": (48, 16), "figure_5": (8, 0)},
    "cp_inference": {
        **{"table_4": (28, 0), "table_5": (10, 0), "table_6": (12, 0), "table_7": (10, 10), "table_8": (30, 30)},
        **{"figure_6": (2, 0), "figure_7": (2, 0), "figure_8": (5, 0), "figure_9": (1, 0)},
    },
    "mesh_attention": {
        **{"table_2": (8, 0), "table_3": (48, 24), "table_4": (48, 24), "table_5": (96, 24)},
        **{"figure_8": (5, 0), "figure_9": (6, 0)},
    },
    "loongtrain": {
        **{"table_2": (124, 0), "table_3": (192, 96), "table_4": (192, 0), "table_5": (64, 64)},
        **{"table_6": (192, 192), "figure_4": (2, 0), "figure_5": (3, 0), "figure_13": (4, 0), "figure_14": (27, 0)},
    },
}
ROW = "overall cp 64 hp 1"


@pytest.mark.parametrize("paper", PAPERS)
def test_every_number_of_the_paper_is_a_cell(paper):
    found = {}
    for table in tables_of(paper):
        cells = read_cells(paper, table)
        assert len({(c.row, c.column) for c in cells}) == len(cells)
        found[table] = len(cells), sum(c.value is None for c in cells)
    assert found == CELLS[paper]


def test_the_rule_of_the_notes_for_the_memory_of_tiles():
    """Mesh-Attention, Table 5, in query chunks: the visible cells within 15 %, with the best tile of each case."""
    cases = defaultdict(dict)
    for cell in read_cells("mesh_attention", "table_5"):
        system, gpus, length, _ = predict._case(cell.row, cell.column)
        if system == predict.MESH and cell.value is not None:
            chunk = length // gpus * predict.HEADS * predict.HEAD_DIM * 2 / predict.GIB
            cases[cell.row, gpus][cell.column.split()[-1]] = cell.value / chunk
    good = []
    for (_, gpus), units in cases.items():
        tried = []
        for a in (2, 4, 8, 16, 32):
            b = gpus / a
            rule = {"forward": 12 + 2 * a + 3 * b, "backward": 12 + 6.5 * a + 6 * b}
            tried.append([abs(rule[way] / paper - 1) for way, paper in units.items()])
        good += [error <= 0.15 for error in min(tried, key=max)]
    assert (sum(good), len(good)) == (31, 36)


def test_each_table_has_a_script():
    for paper in PAPERS:
        for table in tables_of(paper):
            call = f'exec bash "$(dirname "${{BASH_SOURCE[0]}}")/../table.sh" {paper} {table} "$@"'
            assert (HERE / paper / f"{table}.sh").read_text() == f"#!/usr/bin/env bash\n{call}\n"


def test_a_table_is_predicted_and_keeps_what_was_measured(tmp_path, capsys):
    def lines() -> list[dict]:
        with (tmp_path / "attention2d_figure_5.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    tables.main(["attention2d", "figure_5", "--output", str(tmp_path)])
    first, second = lines()
    assert tuple(first) == COLUMNS
    assert (first["paper"], first["predicted"], first["error_percent"]) == ("2", "", "")
    error = 100 * (float(second["predicted"]) / float(second["paper"]) - 1)
    assert float(second["error_percent"]) == pytest.approx(error, abs=0.01)
    assert (second["table"], second["unit"], second["fitted"]) == ("figure_5", "x", "false")
    assert (tmp_path / "attention2d_figure_5.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert f"1.4 | {second['predicted']}" in shown
    assert max(map(len, shown.splitlines())) <= 80

    path = tmp_path / "attention2d_figure_5.csv"
    text = path.read_text()
    path.write_text(text.replace(f"{second['predicted']},,", f"{second['predicted']},1.5,"))
    tables.main(["attention2d", "figure_5", "--output", str(tmp_path)])
    assert [line["measured"] for line in lines()] == ["", "1.5"]


@pytest.mark.parametrize("paper", PAPERS)
def test_pictures_show_the_files_of_today(paper):
    """Run examples/paper_tables/all.sh if this fails."""
    output = ROOT / "paper_tables_out"
    results = {table: read_results(results_file(paper, table, output)) for table in tables_of(paper)}
    for table, found in results.items():
        assert description(output / f"{paper}_{table}.png") == digest({table_name(table): found})
    assert description(PICTURES / f"{paper}.png") == digest(drawn(results))


def test_the_page_shows_all_cells_and_the_constants_of_today():
    """Run examples/paper_tables/all.sh if this fails."""
    files = [results_file(paper, table, ROOT / "paper_tables_out") for paper in PAPERS for table in tables_of(paper)]
    every = [result for file in files for result in read_results(file)]
    assert description(PICTURES / "all.png") == digest({"all": every})
    page = (ROOT / "docs" / "reproduction.md").read_text()
    assert by_hand() in page and fitted() in page and left_out_table() in page
    assert "| `lightseq` | `device.gemm[0].TFLOP_s` | 200 | 80 to 218 | 218, at its bound |" in fitted()


def test_numbers_of_nvidia_are_predicted_within_a_tenth():
    page = (ROOT / "docs" / "reproduction.md").read_text()
    assert nemo_table.words(nemo_table.FOLDER / "notes.md") in page
    row = next(row for row in nemo_table.rows() if row.tokens == 2**14)
    (line,) = [line.split(" | ") for line in page.splitlines() if line.startswith("| 16K | 16 |")]
    numbers = [nemo_table.predicted(row, *reading) for reading in nemo_table.readings().values()]
    assert [cell.split()[0] for cell in line[-2:]] == [f"{number:.0f}" for number in numbers]
    assert numbers[1] == pytest.approx(row.TFLOP_s, rel=0.1)


def test_a_preset_is_what_its_fit_finds():
    """The fastest fit; `python -m examples.paper_tables.testbeds` fits them all."""
    assert testbeds.differences(testbeds.fitted("cp_inference", "gtt")) == {}
    assert [testbed for _, testbed in testbeds.testbeds()] == ["lightseq", "gtt", "mesh-attention", "loongtrain"]


def test_numbers_of_mlperf_are_predicted():
    page = (ROOT / "docs" / "reproduction.md").read_text()
    assert mlperf_table.words(mlperf_table.FOLDER / "notes.md") in page
    row = mlperf_table.rows()[0]
    number = mlperf_table.predicted(row)
    assert row.run.micro_batches == 128 and row.run.world_size == 512
    assert f"| {row.seconds:.3f} | {number:.3f} (" in page


def results_of(paper: str, table: str) -> dict[str, dict[str, float]]:
    """The predictions of today, by column and row."""
    found = defaultdict(dict)
    for result in read_results(results_file(paper, table, ROOT / "paper_tables_out")):
        found[result.column][result.row] = result.predicted
    return found


def test_withheld_decode_times_agree_with_the_text():
    """Section 4.3 of Million-Token Inference, which explains Tables 7 and 8."""
    token = results_of("cp_inference", "table_7")["TTIT"]
    for systems in (("CP1+TP8", "CP2+TP8", "CP4+TP8"), ("CP1+TP8", "TP16", "TP32")):
        times = [token[system] for system in systems]
        assert times == sorted(times)
    found = results_of("cp_inference", "table_8")
    hosts = [found[system] for system in ("TP8", "CP2+TP8", "CP4+TP8")]
    for case in ("128K batch 1", "32K batch 4"):
        one = [of[f"{case} Individual attention op"] for of in hosts]
        assert one == sorted(one, reverse=True)
        for what in ("SendRecv", "All2All", "Whole pass-Q"):
            times = [of[f"{case} {what}"] for of in hosts]
            assert times == sorted(times)


def test_withheld_double_rings_agree_with_the_text():
    """Section 6 of LoongTrain explains Table 5: short MHA gains most, 1.2 with cp 16 at 128K, and 4 is the best."""
    found = results_of("loongtrain", "table_5")
    gains = {column: of["inner ring 1"] / min(of.values()) for column, of in found.items()}
    for heads in ("MHA", "GQA"):
        for sizes in ("cp 64 hp 1", "cp 16 hp 4"):
            of_length = [gains[f"{heads} {sizes} {length}"] for length in ("128K", "256K", "512K", "1M")]
            assert of_length[0] >= max(of_length[2:])
    assert gains["MHA cp 16 hp 4 128K"] == pytest.approx(1.2, rel=0.1)
    choose = CHOICES["loongtrain", "table_5"][1]
    for length in ("128K", "256K", "512K", "1M"):
        rings = [result(row, "", "1", ms) for row, ms in found[f"MHA cp 64 hp 1 {length}"].items()]
        assert choose(rings, key=lambda r: r.predicted).row == "inner ring 4"


def test_contradictions_are_cells():
    for paper in PAPERS:
        cells = {(table, cell.row, cell.column) for table in tables_of(paper) for cell in read_cells(paper, table)}
        assert contradictions(paper).keys() <= cells
    assert contradictions("mesh_attention")["table_5", "full 1M", "mesh 32 GPUs forward"].startswith("a misprint")


def description(path: Path) -> str:
    with Image.open(path) as image:
        return image.text["Description"]


def test_points_are_cells_with_their_errors(tmp_path, monkeypatch):
    def cell(paper: str, predicted: float | None, fitted: bool = False) -> Result:
        return Result("table_1", "row", f"column {paper}", "s", paper, predicted, None, fitted)

    panels = []
    scatter = drawing._scatter

    def scatter_kept(axes, results):
        panels.append(axes)
        scatter(axes, results)

    monkeypatch.setattr(drawing, "_scatter", scatter_kept)
    cells = [cell("2", 2.2), cell("4", 3.9, fitted=True), cell("", 7.0), cell("8", None)]
    drawing.draw({"Table 1": cells}, "a title", tmp_path / "a.png")
    (axes,) = panels
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in points] == [(2, 2.2), (4, 3.9)]
    assert [line.get_markerfacecolor() for line in points] == [drawing.POINT, "none"]
    assert axes.get_title() == "Table 1, s: 2 of 4 cells\nerror: median 6.3 %, worst 10 %"


class Predictor:
    """Of LoongTrain's Table 4: one command for each length of MHA in the first row."""

    CLUSTER = {"table_4": "loongtrain"}
    FITTED = {"table_4": lambda row, column: column.endswith("256K")}

    @staticmethod
    def predict(table, cluster):
        return [float(cell.paper) for cell in read_cells("loongtrain", table)]

    @staticmethod
    def command(table, row, column):
        if row != ROW or "MHA HF" not in column:
            return ""
        length = {"128K": 2**17, "256K": 2**18, "512K": 2**19, "1M": 2**20}[column.split()[-1]]
        return attention_command(64, "ring", length)


@pytest.fixture
def loongtrain(monkeypatch):
    for module in (measure, predictions):
        monkeypatch.setattr(module, "predictor", lambda paper: Predictor)


def table_4(tmp_path: Path, *words: str) -> None:
    tables.main(["loongtrain", "table_4", "--output", str(tmp_path), *words])


def test_a_smaller_case_is_measured_and_marked(tmp_path, monkeypatch, loongtrain, capsys):
    ran = []

    def run(words, cwd, stdout, **how):  # what torchrun starts, as the only rank
        ran.append(words[1:])
        at = words.index("benchmarks/attention_time.py")
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", "0")
        return subprocess.CompletedProcess(words, attention_time.main(words[at + 1 :]))

    monkeypatch.setattr(measure.subprocess, "run", run)
    small = "--nnodes 1 --nproc-per-node 1 --seq-length 64 --num-attention-heads 2 --num-query-groups 2 --dtype fp32"
    table_4(tmp_path, "--mode", "run", "--row", ROW, "--column", "MHA HF 128K", "--", *small.split())
    start = ["-m", "torch.distributed.run", "--standalone", "--nnodes", "1", "--nproc-per-node", "1"]
    assert ran[0][: len(start)] == start
    with (tmp_path / "loongtrain_table_4_scaled.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert line["table"] == f"table_4 with {small}"
    assert (line["paper"], line["predicted"], line["error_percent"]) == ("", "", "")
    (result,) = tmp_path.glob("runs/loongtrain_table_4_scaled/*/1/attention_time.json")
    took = json.loads(result.read_text())
    assert took["problem"]["length"] == 64
    assert float(line["measured"]) == pytest.approx(1e3 * took["seconds"], rel=1e-4)
    assert not (tmp_path / "loongtrain_table_4.csv").exists()


def time_on_ranks(strategy: str) -> dict:
    import torch

    problem = attention_time.Workload(2, 256, 1, 4, 2, 16, "fp32", True)
    return attention_time.measure(strategy, problem, 3, 1, torch.device("cpu"))


def test_attention_is_timed_on_several_ranks(ranks):
    found = ranks(2, time_on_ranks, "lightseq")
    assert found[0] == found[1]  # of the slowest
    assert 0 < found[0]["forward"] < found[0]["seconds"]
    assert found[0]["forward_bytes"] is None


def test_slurm_gets_a_job_for_each_row(tmp_path, monkeypatch, loongtrain, capsys):
    tools = {
        "sbatch": 'cp "$1" "$OUT"; echo Submitted batch job 7',
        "scontrol": "printf 'n1\\nn2\\n'",
        "srun": 'for last; do [ "$last" = --output ] && next=1 && continue; '
        '[ -n "$next" ] && echo \'{"seconds": 0.25}\' >"$last/attention_time.json" && next=; done; '
        'echo "$MASTER_ADDR" "$@"',
    }
    (tmp_path / "bin").mkdir()
    for name, text in tools.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("OUT", str(tmp_path / "submitted"))
    table_4(tmp_path, "--mode", "show")
    shown = capsys.readouterr().out
    assert "#SBATCH --nodes=8\n" in shown and shown.count("\nmeasure ") == 4
    assert f"\n{ROW}: 8 nodes\n" in shown and shown.count(": expected ") == 4
    assert not (tmp_path / "runs").exists()
    table_4(tmp_path, "--mode", "slurm")
    assert capsys.readouterr().out == f"{ROW}: Submitted batch job 7\n"
    script = (tmp_path / "submitted").read_text()
    assert "#SBATCH --nodes=8\n" in script and script.count("\nmeasure ") == 4

    table_4(tmp_path, "--mode", "collect")
    assert capsys.readouterr().out.count("no result") == 4
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", tmp_path / "submitted"], check=True, env=os.environ | job)
    log = (tmp_path / "runs" / "loongtrain_table_4" / "overall_cp_64_hp_1" / "3" / "log.txt").read_text()
    assert log.startswith("n1 --nodes=8 --ntasks=8 ")
    assert "--nproc-per-node=8" in log and "--seq-length 524288" in log
    table_4(tmp_path, "--mode", "collect")
    with (tmp_path / "loongtrain_table_4.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["measured"] for line in lines[:5]] == ["250", "250", "250", "250", ""]
    assert sum(line["fitted"] == "true" for line in lines) == 48


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nobody table_4", "PAPER nobody: unknown; give one of attention2d"),
        ("loongtrain table_9", "TABLE table_9: loongtrain has table_2"),
        ("loongtrain table_4 --row x", "--row, --column: give it with --mode run or slurm"),
        ("loongtrain table_4 --mode run --row x", "--row x: table_4 has overall cp 64 hp 1"),
        ("loongtrain table_4 --mode run", "needs 8 nodes of 8 ranks; give --mode slurm"),
        ("loongtrain table_4 --mode run -- 4", "-- 4: give flags and their values"),
        ("loongtrain table_4 --mode run --column GQA\\ HF\\ 1M", "no command measures these cells"),
    ],
)
def test_wrong_arguments(tmp_path, loongtrain, words, expected):
    with pytest.raises(UsageError) as raised:
        own, _, others = words.partition(" -- ")
        tables.main([*shlex.split(own), "--output", str(tmp_path), *(["--", others] if others else [])])
    assert expected in str(raised.value)


def test_flags_after_two_dashes_win():
    command = shlex.split(training_command(64, "--preset llama2-7b --bf16 --seq-length 131072"))
    assert changed(command, ["--nnodes", "1", "--seq-length", "64", "--mock"]) == shlex.split(
        "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --preset llama2-7b --bf16 --seq-length 64 --mock"
    )


@pytest.mark.parametrize("fitted", [lambda row, column: column == "CP2+TP8 TTFT" or "8K" in row, lambda *of: True])
def test_no_more_than_a_third_is_fitted(tmp_path, monkeypatch, fitted):
    class Greedy(Predictor):
        CLUSTER = {"table_6": "gtt"}
        FITTED = {"table_6": fitted}
        predict = staticmethod(lambda table, cluster: [1.0] * 12)

    monkeypatch.setattr(predictions, "predictor", lambda paper: Greedy)
    with pytest.raises(ValueError, match="fit a third at most"):
        predictions.predicted("cp_inference", "table_6", tmp_path)


def test_withheld_cells_are_not_fitted(tmp_path, monkeypatch):
    class Whole(Predictor):
        FITTED = {"table_3": lambda row, column: row.endswith("cp 64 hp 1")}
        CLUSTER = {"table_3": "loongtrain"}
        predict = staticmethod(lambda table, cluster: [1.0] * 192)

    monkeypatch.setattr(predictions, "predictor", lambda paper: Whole)
    results = predictions.predicted("loongtrain", "table_3", tmp_path)
    assert {r.row for r in results if r.fitted} == {"MHA cp 64 hp 1"}


def test_measured_numbers_have_the_unit_of_the_cell(tmp_path):
    log = tmp_path / "log.txt"
    records = [Record(i, i, 2.5, 1e-3, 1.0, i, 100 * i, 10 * i, 1) for i in (9, 1, 2, 3)]
    log.write_text("".join(f"{line_of(record, 9, 100.0)}\n" for record in records))
    words = shlex.split(training_command(8, "--bf16"))
    for unit, expected in (("s", 2.0), ("ms", 2000.0), ("tokens/s/GPU", 200.0), ("fraction", 0.2), ("x", None)):
        value = measured(Cell("row", "column", unit, ""), words, tmp_path, log)
        assert value == (None if expected is None else pytest.approx(expected))
    (tmp_path / "attention_time.json").write_text('{"seconds": 0.5, "forward": 0.2, "forward_bytes": 3e9}')
    words = shlex.split(attention_command(8, "ring", 1024))
    for unit, column, expected in (("1e-2 iter/s", "ring", 200), ("us", "x forward", 2e5), ("GB", "x forward", 3)):
        assert measured(Cell("row", column, unit, ""), words, tmp_path, log) == pytest.approx(expected)
    assert measured(Cell("SeqAlltoAll cp 8 hp 8", "MHA HF 1M", "ms", ""), words, tmp_path, log) is None
    (tmp_path / "passes.csv").write_text("choice,milliseconds\npass-q,30\ndecode,4\n")
    words = shlex.split(inference_command("--ranks 4 --choices pass-q"))
    for column, expected in (("pass-Q", 30), ("CP2+TP8 TTFT", 30), ("CP2+TP8 TTIT", 4), ("SendRecv", None)):
        assert measured(Cell("row", column, "ms", ""), words, tmp_path, log) == expected


def result(row: str, column: str, paper: str, predicted: float | None) -> Result:
    return Result("t", row, column, "ms", paper, predicted, None, False)


def test_how_predictions_are_judged():
    results = [result("a", "1", "10", 11.0), result("b", "1", "8", 9.0), result("a", "2", "4", 5.0)]
    results += [result("b", "2", "5", 4.0), result("c", "2", "", 1.0), result("c", "1", "0", 1.0)]
    assert Errors.of(results) == Errors(4, pytest.approx(16.25), pytest.approx(25))
    found = regret(results[:4], (lambda r: r.column, min))
    assert (found.choices, found.right, found.worst) == (2, 1, pytest.approx(25))
    assert as_printed([result("a", "1", "2.1", 2.14), result("a", "2", "2.1", 2.16)]) == (1, 2)
