"""Faults in files between two runs, and command lines that do not match a checkpoint."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from .bench import write_data
from .verdict import LOST, NAMED, Case, all_well, refused_or_right, resumes

TRACKER = "latest_checkpointed_iteration.txt"
LATEST, BEFORE = 4, 2  # iterations of the checkpoints
FILES = r"\.distcp$", r"^\.metadata$", r"^common\.pt$", r"^metadata\.json$", r"^args\.json$", r"^manifest"


def flip(path: Path, random: Random) -> str:
    data = bytearray(path.read_bytes())
    at, bit = random.randrange(len(data)), random.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at} flipped"


def cut(path: Path, random: Random) -> str:
    size = random.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.truncate(size)
    return f"cut to {size} bytes"


def empty(path: Path, random: Random) -> str:
    path.write_bytes(b"")
    return "emptied"


def remove(path: Path, random: Random) -> str:
    path.unlink()
    return "removed"


def garble(path: Path, random: Random) -> str:
    path.write_bytes(random.randbytes(path.stat().st_size))
    return "overwritten with noise"


DAMAGES: tuple[Callable[[Path, Random], str], ...] = (flip, cut, empty, remove, garble)


def _checkpoints(case: Case) -> Path:
    """The files of a run that ended after iteration LATEST."""
    save = case.bench.copy(case.layout)
    for path in save.glob("iter_*"):
        if int(path.name[5:]) > LATEST:
            shutil.rmtree(path)
    (save / TRACKER).write_text(str(LATEST))
    return save


def checkpoint_file(case: Case) -> None:
    """One file of the latest checkpoint is damaged: the error names it, and the previous one loads on request."""
    save = _checkpoints(case)
    latest = save / f"iter_{LATEST:07d}"
    names = sorted(path.name for path in latest.iterdir())
    kind = case.random.choice([kind for kind in FILES if any(map(re.compile(kind).search, names))])
    name = case.random.choice([name for name in names if re.search(kind, name)])
    damage = case.random.choice((flip, flip, *DAMAGES))
    _damaged(case, save, f"{name} {damage(latest / name, case.random)}", re.escape(name))


def tracker(case: Case) -> None:
    """The tracker is damaged: the error names it, or the newest complete checkpoint is loaded."""
    save = _checkpoints(case)
    content = case.random.choice(("", "garbage\n", "5", "\x00\x00", "-4", "4 4", "99999999999999999999"))
    (save / TRACKER).write_text(content)
    _damaged(case, save, f"tracker holds {content!r}", "latest_checkpointed_iteration|iter_")


def _damaged(case: Case, save: Path, what: str, *wanted: str) -> None:
    outcome = case.bench.run(case.layout, save, ends_others=True)
    case.strike(what, outcome)
    case.injected, case.wrong = True, []
    if refused_or_right(case, outcome, save, *wanted, "--load-fallback", f"--ckpt-step {BEFORE}|--ckpt-step {LATEST}"):
        resumes(case, save, more="--load-fallback")


def leftovers(case: Case) -> None:
    """A kill left an unfinished directory, or happened between the two renames that replace a checkpoint."""
    save = _checkpoints(case)
    latest = save / f"iter_{LATEST:07d}"
    if case.random.random() < 0.5:
        shutil.copytree(latest, save / "iter_0000006.incomplete")
        (save / "iter_0000006.incomplete" / "args.json").unlink(missing_ok=True)
        what = "an unfinished iteration 6"
    else:
        shutil.copytree(latest, f"{latest}.incomplete")
        latest.rename(f"{latest}.replaced")
        what = f"killed between the renames of iteration {LATEST}"
    outcome = case.bench.run(case.layout, save, ends_others=True)
    case.injected, case.what = True, f"{case.layout}: {what}"
    if refused_or_right(case, outcome, save, "iter_|iteration"):
        resumes(case, save, more="--load-fallback")


def data_file(case: Case) -> None:
    """A file of tokens or of sample indices is damaged: the error names it, or it is rebuilt identically."""
    folder = case.bench.fresh("data")
    shutil.copytree(case.bench.data.parent, folder, dirs_exist_ok=True)
    name = case.random.choice(("corpus.idx", "corpus.idx", "corpus.bin", "corpus.json", "cache", "cache"))
    if name == "cache":
        case.bench.reference(case.layout)  # fills it
        shutil.copytree(case.bench.data.parent, folder, dirs_exist_ok=True)
        path = case.random.choice(sorted(path for path in (folder / "cache").rglob("*") if path.suffix == ".npy"))
        damage = case.random.choice(DAMAGES)
    else:
        path = folder / name
        damage = case.random.choice((cut, empty, remove) if name == "corpus.bin" else DAMAGES)
    done = damage(path, case.random)
    save = case.bench.fresh(case.layout)
    outcome = case.bench.run(case.layout, save, more=f"--data-path {folder / 'corpus'}", ends_others=True)
    case.injected, case.what = True, f"{case.layout}: {path.name} {done}"
    refused_or_right(case, outcome, save, re.escape(path.name) if name != "cache" else "cache")


def token_in_file(case: Case) -> None:
    """A token of the data is beyond the vocabulary."""
    folder = case.bench.fresh("data")
    shutil.copytree(case.bench.data.parent, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("cache"))
    path = folder / "corpus.bin"
    data, token = bytearray(path.read_bytes()), case.random.choice((257, 263, 300, 65535))
    at = case.random.randrange(len(data) // 2)
    data[2 * at : 2 * at + 2] = token.to_bytes(2, "little")
    path.write_bytes(data)
    save = case.bench.fresh(case.layout)
    outcome = case.bench.run(case.layout, save, more=f"--data-path {folder / 'corpus'}", ends_others=True)
    case.injected, case.what = True, f"{case.layout}: token {at} of corpus.bin is {token}"
    case.expect(LOST, refused_or_right(case, outcome, save, rf"\b{token}\b", str(folder / "corpus")), "accepted")


REFUSED = (  # changes to the run, by the flag that the error must name
    "--seed 7",
    "--seq-length 128",
    "--window-size 16,0",
    "--reset-attention-mask",
    "--eod-mask-loss",
    "--hidden-size 64",
    "--num-layers 4",
    "--rotary-base 500",
    "--norm-epsilon 1e-3",
    "--split 100,0,0 --eval-iters 0",
    "--softmax-type learnable",
    "--qk-layernorm",
    "--data-path OTHER",
)


def other_flags(case: Case) -> None:
    """A resume that changes the model, or the order of the data, is refused by the flag that does it."""
    save = _checkpoints(case)
    more = case.random.choice(REFUSED)
    if "OTHER" in more:
        folder = case.bench.fresh("data")
        for path in case.bench.data.parent.glob("corpus.*"):
            shutil.copy(path, folder / path.name.replace("corpus", "other"))
        write_data(folder / "other", seed=1)
        more = f"--data-path {folder / 'other'}"
    outcome = case.bench.run(case.layout, save, more=more, ends_others=True)
    case.injected, case.what = True, f"{case.layout}: resumed with {more}"
    case.expect(LOST, outcome.statuses.get(0) != 0, "accepted")
    if outcome.statuses.get(0):
        refused_or_right(case, outcome, save, re.escape(more.split()[0]))


def other_layout(case: Case) -> None:
    """A run resumes with other parallel sizes and has the losses of the undisturbed run, up to rounding."""
    save = _checkpoints(case)
    halves = ("--context-parallel-size 2", "--tensor-model-parallel-size 2")
    if "tp2" in case.layout:  # its --sequence-parallel needs them
        halves = halves[1:]
    sizes = case.random.choice((*halves, " ".join(halves)) if case.ranks == 4 else halves)
    more = f"--context-parallel-size 1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 {sizes}"
    outcome = case.bench.run(case.layout, save, more=f"{more} --no-load-rng --cp-strategy ring")
    case.injected, case.what = True, f"{case.layout}: resumed with {sizes}"
    all_well(case, outcome)
    if set(outcome.statuses.values()) == {0}:
        refused_or_right(case, outcome, save, near=1e-5)


def other_rate(case: Case) -> None:
    """A resume with another learning rate is accepted and reported in one line."""
    save = _checkpoints(case)
    outcome = case.bench.run(case.layout, save, more="--lr 5e-3", ends_others=True)
    case.injected, case.what = True, f"{case.layout}: resumed with --lr 5e-3"
    all_well(case, outcome)
    told = [line.text for line in outcome.lines if "--lr" in line.text]
    case.expect(NAMED, len(told) == 1, f"{len(told)} lines name --lr")
