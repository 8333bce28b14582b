"""tools/plan.py; what it draws is in test_pictures.py."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.context_parallel.commands import programs

TOOL = Path(__file__).parents[2] / "tools" / "plan.py"


@pytest.fixture
def run(monkeypatch, capsys):
    """The program in this process: `run(*argv)` returns its exit status, output and errors."""
    for name in {"RANK", "TERM", "NO_COLOR", "FORCE_COLOR"} & {*os.environ}:
        monkeypatch.delenv(name)

    def program(*argv: str) -> tuple[int | None, str, str]:
        monkeypatch.setattr(sys, "argv", [str(TOOL), *argv])
        with pytest.raises(SystemExit) as leaving:
            programs.plan()
        return leaving.value.code, *capsys.readouterr()

    return program


def rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines()]


def test_table_drawings_and_page(tmp_path, run):
    files = ["--draw", str(tmp_path / "p.png"), "--html", str(tmp_path / "p.html")]
    status, output, _ = run("ring:layout=contiguous", "allgather", "--ranks", "4", *files)
    assert status is None
    table = rows(output)
    assert ["ring:layout=contiguous", "forward", "6", "4", "37.50%", "8"] in table
    by_tensor = [["allgather,", "zigzag", "layout"], ["forward", "6", "KV"], ["backward", "6", "DKV", "+", "6", "KV"]]
    assert table[-3:] == by_tensor
    assert ["allgather", "backward", "12", "3", "0.00%", "21"] in table
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "p-allgather-4-ranks-backward.png",
        "p-allgather-4-ranks-forward.png",
        "p-ring-layout-contiguous-4-ranks-backward.png",
        "p-ring-layout-contiguous-4-ranks-forward.png",
        "p.html",
    ]
    text = (tmp_path / "p.html").read_text()
    assert '"measure":"units"' in text
    assert re.findall(r'{"name":"(\w+[^"]*)","passes"', text) == ["ring:layout=contiguous", "allgather"]


@pytest.mark.parametrize("terminal", [True, False])
def test_table_fits_80_columns(terminal, run, monkeypatch):
    specs = ["ring", "mesh:grid=2x4", "loongtrain:inner_ring_size=2", "usp:head_parallel_size=4", "attention2d"]
    for name, value in ({"COLUMNS": "80", "FORCE_COLOR": "1"} if terminal else {"COLUMNS": "30"}).items():
        monkeypatch.setenv(name, value)
    status, output, _ = run(*specs, *["--ranks", "8", "--seq-length", "1048576", "--layout", "cyclic"])
    assert status is None
    lines = re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines()
    assert "…" not in output and max(map(len, lines)) <= 80, lines
    assert ("│" in output) is terminal
    assert "loongtrain:inner_ring_size=2, cyclic layout" in lines
    assert terminal or any(line.startswith("loongtrain:inner_ring_size=2  ") for line in lines)


def test_bytes_of_a_sequence(tmp_path, run):
    flags = ["--num-attention-heads", "8", "--num-query-groups", "2", "--kv-channels", "64", "--seq-length", "4096"]
    specs = ["ring:head_parallel_size=2", "mesh:head_parallel_size=2"]
    status, output, _ = run(*specs, "--ranks", "4", *flags, "--html", str(tmp_path / "p.html"))
    assert status is None
    table = rows(output)
    sizes = {row[1]: row[3] for row in table if row[:1] == specs[:1] and row[1] in ("forward", "backward")}
    unit = 1024 * 8 * 64 * 2 / 2**20  # a chunk of queries in 16 bits, MiB
    statistics = 4 / (64 * 2)  # a float32 per row and head: the log-sum-exp with O, delta with its gradient
    swaps = (2 + 2 / 4 + statistics) / 2  # Q, KV and O, or their gradients, half of each
    forward, backward = swaps + 2 / 4, swaps + 2 / 4 + 2 * 2 / 4
    assert sizes == {"forward": f"{forward * unit:.4g}", "backward": f"{backward * unit:.4g}"}
    assert '"measure":"bytes"' in (tmp_path / "p.html").read_text()


def documents(text: str, ranks: int = 2, tokens: int = 64) -> list[str]:
    return ["ring", "--ranks", str(ranks), "--seq-length", str(tokens), "--documents", text]


def test_documents_by_layout(tmp_path, run):
    # Documents of 12 and 36 tokens have 78 and 666 visible pairs: 248 are the mean of three ranks.
    status, output, _ = run(*documents("12,36", 3, 48), "--draw", str(tmp_path / "p.svg"))
    assert status is None
    table = rows(output)
    start = table.index(["2", "documents", "of", "12", "to", "36", "tokens"])
    assert table[start + 1 : start + 6] == [  # as counted in a dense mask
        ["tokens", "work", "received", "mean"],
        ["contiguous", "1.84", "0.417", "0.167"],
        ["zigzag", "1.19", "0.583", "0.389"],
        ["cyclic", "1.06", "0.667", "0.625"],
        ["placement", "1.00", "0.667", "0.500"],
    ]
    assert "placement: 1.00 of the mean work" in comments(tmp_path / "p-documents-3-ranks.svg")


def comments(svg: Path) -> list[str]:
    """The texts of a picture; matplotlib writes each beside its glyphs."""
    return re.findall(r"<!-- (.*) -->", svg.read_text())


def test_documents_of_files_and_drawn(tmp_path, run):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("32 16\n16\n70")
    assert "3 documents of 16 to 32 tokens" in run(*documents(str(lengths)))[1]
    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"))
    for length in (40, 0, 30):
        builder.add_document(torch.zeros(length, dtype=torch.int64), [length])
    builder.finalize(str(tmp_path / "data.idx"))
    assert "2 documents of 24 to 40 tokens" in run(*documents(str(tmp_path / "data")))[1]
    drawn = [run(*documents("lognormal:9,1"))[1] for _ in range(2)]
    assert drawn[0] == drawn[1] and "documents of" in drawn[0]


def test_documents_on_a_cluster(run):
    flags = ["--ranks", "16", "--seq-length", "131072", "--cluster", "dgx-h100", "--num-attention-heads", "32"]
    status, output, _ = run("ring", *flags, "--documents", "131072", "--full-mask")
    assert status is None
    *_, placement = [row for row in rows(output) if row[:1] in (["cyclic"], ["placement"])]
    # 2 * 2 * 128 * 32 operations a pair at 646 * 10^12, then 2.5 times as many at 559: 131072 x 8192 pairs of a rank,
    # in blocks of 8192 rows. Links take less.
    seconds = 131072 * 8192 * 4 * 128 * 32 * (1 / 646e12 + 2.5 / 559e12)
    assert placement == ["placement", "1.00", "0.938", "0.938", "0.500", f"{seconds * 1e3:.4g}"]


@pytest.mark.parametrize(
    "argv,words",
    [
        (["spiral", "--ranks", "4"], ["--cp-strategy spiral", "ring"]),
        (["ring", "--ranks", "0"], ["--ranks 0", "1 or more"]),
        (["--ranks", "4"], ["SPEC: missing; give ring"]),
        (["ring", "--ranks", "4", "--seq-length", "6"], ["--seq-length 6", "--ranks 4"]),
        (["ulysses", "--ranks", "4", "--num-attention-heads", "6"], ["--cp-head-parallel-size 4", "1, 2, 3, 6"]),
        (["ring", "--ranks", "4", "--documents", "5"], ["--documents 5", "needs --seq-length"]),
        (documents("60,5"), ["--documents 60,5: 65 tokens", "give --seq-length 65 or more"]),
        (documents("1x99999999999"), ["99999999999 tokens"]),
        (documents("0x99999999999"), ["--documents 0x99999999999: No such file", "give lengths, such as 8192,1024x20"]),
        (documents("lognormal:1.1.1,2"), ["median from 1", "such as lognormal:1100,1.5"]),
        (documents("lognormal:0,1"), ["median from 1"]),
        (documents("lognormal:5,11"), ["sigma to 10"]),
        (documents("no/where"), ["--documents no/where: No such file", "prefix of an .idx"]),
        (documents(os.devnull), ["a document has 1 token or more"]),
        (documents(__file__), ["invalid literal", "text file of lengths"]),
        (["ring", "--ranks", "4", "--draw", "p.gif"], ["--draw p.gif", ".png or .svg"]),
        (["ring", "--ranks", "4", "--html", "p.htm"], ["--html p.htm", ".html"]),
        (["ring", "--ranks", "4", "--draw", "no/where.png"], ["--draw no/where.png", "create it first"]),
        (
            ["ring", "--ranks", "4", "--num-attention-heads", "8", "--num-query-groups", "3"],
            ["--num-query-groups 3", "divide", "8"],
        ),
    ],
)
def test_mistakes(argv, words, run):
    status, output, error = run(*argv)
    assert status == 2 and output == ""
    assert error.count("\n") == 1 and all(word in error for word in words), error
