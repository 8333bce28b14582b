"""Damage to a checkpoint prints one line with the file and the remedy, never a traceback or a wrong weight."""

import io
import json
import os
import pickle
import shutil
from pathlib import Path, PosixPath

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.context_parallel.commands import checkpoint as tool
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.integration.huggingface.folder import SafetensorsFolder
from megatron.context_parallel.patches.megatron_checkpoint_writer import HAS_COMMON_FILE
from megatron.context_parallel.trainer.checkpoint import plain_read
from megatron.context_parallel.trainer.checkpoint import save_load as checkpoint
from megatron.context_parallel.trainer.checkpoint.manifest import (
    MANIFEST,
    File,
    _own_checksum,
    content_faults,
    file_record,
    make_manifest,
    read_manifest,
    share_of,
    write_manifest,
)
from megatron.context_parallel.trainer.checkpoint.store import (
    TRACKER,
    existing,
    iteration_directory,
    iterations,
    latest_iteration,
    loadable_checkpoints,
    quick_fault,
    superseded,
)
from megatron.context_parallel.trainer.config.flags import Flags
from megatron.context_parallel.trainer.data.index_cache import drop_damaged
from megatron.context_parallel.trainer.data.index_file import tokenizer_of
from tests.support import training_case

LAST, BEFORE = "iter_0000004", "iter_0000002"


def flip_a_bit(path: Path, share: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()  # root may read any file


def forget_manifest(directory: Path) -> None:
    """Makes it look as if a version without manifests had saved it."""
    (directory / "manifest.json").unlink()
    saved = json.loads((directory / "args.json").read_text())
    del saved["no_verify_checkpoint"]
    (directory / "args.json").write_text(json.dumps(saved))


DAMAGES = {  # (what happens to the run's directory, what the line says of it)
    "flipped shard": (lambda run: flip_a_bit(run / LAST / "__0_0.distcp"), f"{LAST}/__0_0.distcp is damaged"),
    "flipped last byte": (
        lambda run: flip_a_bit(run / LAST / "__0_1.distcp", 0.999),
        f"{LAST}/__0_1.distcp is damaged",
    ),
    "cut shard": (lambda run: cut(run / LAST / "__0_1.distcp"), f"{LAST}/__0_1.distcp has "),
    "long shard": (lambda run: (run / LAST / "__0_0.distcp").open("ab").write(b"x"), f"{LAST}/__0_0.distcp has "),
    "no shard": (lambda run: (run / LAST / "__0_0.distcp").unlink(), f"{LAST}/__0_0.distcp is missing"),
    "unreadable shard": (
        lambda run: make_unreadable(run / LAST / "__0_0.distcp"),
        f"{LAST}/__0_0.distcp is not a file",
    ),
    "no shards": (
        lambda run: [p.unlink() for p in (run / LAST).glob("*.distcp")],
        "__0_0.distcp is missing (and 3 more)",
    ),
    "no metadata": (lambda run: (run / LAST / ".metadata").unlink(), f"{LAST}/.metadata is missing"),
    "empty metadata": (lambda run: (run / LAST / ".metadata").write_bytes(b""), f"{LAST}/.metadata has 0 bytes"),
    "flipped metadata": (lambda run: flip_a_bit(run / LAST / ".metadata"), f"{LAST}/.metadata is damaged"),
    "no metadata.json": (lambda run: (run / LAST / "metadata.json").unlink(), f"{LAST}/metadata.json is missing"),
    "garbled metadata.json": (lambda run: flip_a_bit(run / LAST / "metadata.json"), f"{LAST}/metadata.json is damaged"),
    "no args.json": (lambda run: (run / LAST / "args.json").unlink(), f"{LAST}/args.json is missing"),
    "garbled args.json": (lambda run: flip_a_bit(run / LAST / "args.json"), f"{LAST}/args.json is damaged"),
    "cut manifest": (lambda run: cut(run / LAST / "manifest.json"), f"{LAST}/manifest.json is damaged"),
    "flipped manifest": (lambda run: flip_a_bit(run / LAST / "manifest.json"), f"{LAST}/manifest.json is damaged"),
    "no manifest": (lambda run: (run / LAST / "manifest.json").unlink(), f"{LAST}/manifest.json is missing"),
    "nothing": (lambda run: shutil.rmtree(run / LAST), f"{LAST} is missing"),
    "garbled tracker": (lambda run: (run / TRACKER).write_bytes(b"\xff\xfe4"), f"{TRACKER} contains"),
    "empty tracker": (lambda run: (run / TRACKER).write_text(""), f"{TRACKER} contains ''"),
    "unreadable tracker": (lambda run: make_unreadable(run / TRACKER), f"{TRACKER} cannot be read"),
    "tracker of nothing": (lambda run: (run / TRACKER).write_text("9"), "iter_0000009 is missing"),
}
if HAS_COMMON_FILE:
    DAMAGES |= {
        "no common.pt": (lambda run: (run / LAST / "common.pt").unlink(), f"{LAST}/common.pt is missing"),
        "flipped common.pt": (lambda run: flip_a_bit(run / LAST / "common.pt"), f"{LAST}/common.pt is damaged"),
    }


def test_a_directory_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)  # root may read any folder
    with pytest.raises(UsageError, match=rf"^--load {tmp_path} cannot be read \(Permission denied\); make it readable"):
        loadable_checkpoints(Flags(load=str(tmp_path)))


class Code:
    """A pickle of it creates a file when it is loaded."""

    def __init__(self, created: Path) -> None:
        self.created = created

    def __reduce__(self):
        return os.mkdir, (str(self.created),)


def add_code(run: Path, part: str) -> None:
    """Put code into a part of the last checkpoint, as one who can also write its manifest."""
    folder, code = run / LAST, Code(run / "ran")
    if part == "common" and HAS_COMMON_FILE:
        torch.save(torch.load(folder / "common.pt") | {"progress": code}, folder / "common.pt")
    else:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        if part == ".metadata":
            metadata.planner_data = code
        else:  # what all ranks share, or the random generators of rank 0
            name = "common_state/shard_0_1" if part == "common" else "rng/shard_0_2"
            shard = metadata.storage_data[MetadataIndex(name)]
            with (folder / shard.relative_path).open("ab") as file:
                shard.offset = file.tell()
                torch.save([code], file)
                shard.length = file.tell() - shard.offset
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "manifest.json").unlink()
    write_manifest(folder, make_manifest(folder, {}))


@pytest.mark.parametrize("verified", [True, False])
def test_code_in_a_checkpoint_is_refused_and_not_run(ranks, run, tmp_path, verified):
    copies = []
    for part in (".metadata", "common", "a shard"):
        copies.append(shutil.copytree(run, tmp_path / part))
        add_code(copies[-1], part)
    for found in ranks(2, load_each, [str(copy) for copy in copies], {"no_verify_checkpoint": not verified}):
        for copy, told in zip(copies, found, strict=True):
            assert f"--load {copy}: {LAST} contains more than data: loading it would run " in str(told)
            assert ".mkdir, so it was not loaded; give a checkpoint that this program saved" in str(told)
            assert not (copy / "ran").exists()


def test_paths_that_python_3_13_saved_are_read():
    saved = b"\x80\x04\x8c\x0epathlib._local\x8c\x09PosixPath\x93."
    assert plain_read._Unpickler(io.BytesIO(saved)).load() is PosixPath


def save_twice(directory: str, async_save: bool = False) -> None:
    training_case.train("llama", train_iters=4, save=directory, save_interval=2, async_save=async_save)


def load_each(directories: list[str], changes: dict) -> list[str | int]:
    """The outcome of loading each of them: the message, or the loaded iteration."""
    args = training_case.case_args("llama", **changes)
    with training_case.groups(args):
        state = training_case.build(args)
        return [_load(args, state, directory) for directory in directories]


def _load(args, state, directory: str) -> str | int:
    args.load = directory
    weights = [parameter.detach().clone() for parameter in state.model[0].parameters()]
    try:
        checkpoint.load_checkpoint(args, state)
    except UsageError as error:
        after = state.model[0].parameters()
        untouched = all(torch.equal(old, new) for old, new in zip(weights, after, strict=True))
        return str(error) if untouched or args.no_verify_checkpoint else f"loaded something: {error}"
    return state.progress.iteration


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """A run of 2 ranks with checkpoints at iterations 2 and 4."""
    directory = tmp_path_factory.mktemp("checkpoints") / "run"
    ranks(2, save_twice, str(directory))
    return directory


@pytest.fixture(scope="module")
def damaged(run):
    """A copy of it for each kind of damage."""
    directories = {}
    for number, (kind, (damage, _)) in enumerate(DAMAGES.items()):
        directories[kind] = shutil.copytree(run, run.parent / f"damaged{number}")
        damage(directories[kind])
    return directories


def test_damage_is_found_before_anything_is_loaded(ranks, run, damaged):
    directories = [str(run), *map(str, damaged.values())]
    for found in ranks(2, load_each, directories, {}):
        assert found[0] == 4
        for (kind, (_, said)), directory, line in zip(DAMAGES.items(), directories[1:], found[1:], strict=True):
            assert isinstance(line, str), kind
            assert said in line and line.startswith(f"--load {directory}: "), (kind, line)
            newest = 4 if "tracker" in kind else 2
            assert line.endswith(f"; give --ckpt-step {newest}, or --load-fallback"), (kind, line)
            assert "\n" not in line


def test_fallback_loads_the_newest_complete_one(ranks, run, damaged):
    kinds = ("flipped shard", "no args.json", "nothing", "garbled tracker")
    directories = [str(run), *(str(damaged[kind]) for kind in kinds)]
    assert ranks(2, load_each, directories, {"load_fallback": True}) == [[4, 2, 2, 2, 4]] * 2


def test_other_choices_of_what_to_load(ranks, run, damaged, tmp_path):
    both = shutil.copytree(damaged["cut shard"], tmp_path / "both")
    cut(both / BEFORE / ".metadata")
    for found in ranks(1, load_each, [str(both)], {"load_fallback": True}):
        assert "__0_1.distcp has" in found[0] and "no other checkpoint in it is complete; give another" in found[0]
    flipped = str(damaged["flipped shard"])
    assert ranks(2, load_each, [flipped, str(run)], {"ckpt_step": 2}) == [[2, 2]] * 2
    assert ranks(1, load_each, [flipped], {"no_verify_checkpoint": True}) == [[4]]  # as asked for
    assert "iter_0000003 is missing; give --ckpt-step 2" in ranks(1, load_each, [str(run)], {"ckpt_step": 3})[0][0]


@pytest.mark.skipif(not HAS_COMMON_FILE, reason="those have a common.pt")
def test_checkpoints_from_before_there_was_a_manifest(ranks, run, tmp_path):
    old = shutil.copytree(run, tmp_path / "old")
    forget_manifest(old / LAST)
    broken = {}
    for name in (".metadata", "metadata.json", "common.pt"):
        broken[name] = shutil.copytree(old, tmp_path / f"old_{name}")
        cut(broken[name] / LAST / name)
    empty = shutil.copytree(old, tmp_path / "empty")
    (empty / LAST / "common.pt").write_bytes(b"")
    found = ranks(2, load_each, [str(old), *map(str, broken.values()), str(empty)], {})
    for fine, *lines in found:
        assert fine == 4
        assert all(f"{LAST} cannot be read (" in line and "\n" not in line for line in lines[:3])
        assert f"{LAST}/common.pt is missing or empty; give --ckpt-step 2" in lines[3]


def test_a_checkpoint_of_a_later_release_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "HAS_COMMON_FILE", True)
    write_manifest(tmp_path, make_manifest(tmp_path, {}))
    args = Flags(load=str(tmp_path))
    with pytest.raises(
        UsageError, match=r"saved with megatron-core 0\.19 or later, and this is .*; install megatron-core 0"
    ):
        checkpoint._check_release(args, tmp_path)
    (tmp_path / "common.pt").touch()
    write_manifest(tmp_path, make_manifest(tmp_path, {}))
    checkpoint._check_release(args, tmp_path)


def test_a_kill_while_an_iteration_is_replaced_loses_nothing(run, tmp_path):
    killed = shutil.copytree(run, tmp_path / "killed")
    last = killed / LAST
    shutil.copytree(last, killed / f"{LAST}.incomplete")
    last.rename(killed / f"{LAST}.replaced")
    assert iterations(killed) == [2, 4]
    assert quick_fault(existing(killed, 4)) is None
    checkpoint.clear_leftovers(killed)
    assert {path.name for path in killed.iterdir()} == {LAST, BEFORE, TRACKER}
    assert quick_fault(last) is None


def test_what_is_complete_is_found_without_a_tracker(ranks, run, tmp_path):
    killed = shutil.copytree(run, tmp_path / "killed")
    (killed / TRACKER).unlink()  # as after a kill before the first of them is written
    assert ranks(1, load_each, [str(killed)], {}) == [[4]]


def test_manifest(tmp_path):
    for name, size in (("a", 0), ("b", 5), ("c", (1 << 22) + 1)):
        (tmp_path / name).write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    manifest = make_manifest(tmp_path, {"a": file_record(tmp_path / "a")})
    assert {name: record.bytes for name, record in manifest.items()} == {"a": 0, "b": 5, "c": (1 << 22) + 1}
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert content_faults(tmp_path, manifest, manifest) == []
    (tmp_path / "c").write_bytes((tmp_path / "c").read_bytes()[:-1] + b"y")
    assert content_faults(tmp_path, manifest, manifest) == [
        "c is damaged: its contents have changed since it was written"
    ]


DEEP = b"[" * 100_000  # which Python's own parser refuses with a RecursionError


@pytest.mark.parametrize(
    ("file", "content", "fault"),
    [
        ("args.json", DEEP, "args.json is damaged"),
        (MANIFEST, DEEP, f"{MANIFEST} is damaged"),
        *(
            (MANIFEST, json.dumps({"of files": _own_checksum(files), "files": files}).encode(), fault)
            for files, fault in (
                (5, f"{MANIFEST} is damaged"),  # no files, though its checksum is right
                ({"\0": [1, "a"]}, r"'\x00' is not a file name"),
            )
        ),
    ],
)
def test_odd_files_of_a_checkpoint_are_faults(tmp_path, file, content, fault):
    checkpoint = tmp_path / "iter_0000003"
    checkpoint.mkdir()
    for name in ("args.json", "metadata.json", ".metadata", "common.pt"):
        (checkpoint / name).write_text("{}")
    assert quick_fault(checkpoint) is None
    (checkpoint / file).write_bytes(content)
    assert quick_fault(checkpoint) == f"iter_0000003/{fault}"


@pytest.mark.parametrize("digits", [20, 300, 5000], ids=str)
def test_a_tracker_with_a_huge_number_is_refused(tmp_path, digits):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9" * digits)
    with pytest.raises(UsageError, match="contains '99999999999999999999', not an iteration such as 100"):
        latest_iteration(tmp_path)


def test_other_readers_of_json_refuse_brackets_in_brackets(tmp_path):
    (tmp_path / "data.json").write_bytes(DEEP)
    with pytest.raises(ValueError, match=r"data.json does not describe a tokenizer"):
        tokenizer_of(f"{tmp_path}/data")
    (tmp_path / "sha256.json").write_bytes(DEEP)
    assert drop_damaged(tmp_path) == []


@pytest.mark.parametrize(
    "weight_map", [5, ["ab"], {"a": 5}, {"a": ["x"]}, {"a": "\0"}, {"a": "\ud800"}, {"a": ".."}, DEEP]
)
def test_odd_indices_of_safetensors_are_refused(tmp_path, weight_map):
    content = weight_map if isinstance(weight_map, bytes) else json.dumps({"weight_map": weight_map}).encode()
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"model.safetensors.index.json: (damaged|names .*)|cannot be read"):
        SafetensorsFolder(tmp_path)


def test_a_weight_in_two_files_is_refused(tmp_path):
    """Which of them was read depended on the hash of their names."""
    for file, value in (("x", 1.0), ("y", 2.0)):
        save_file({"a": torch.full((2,), value), file: torch.zeros(1)}, tmp_path / f"{file}.safetensors")
    weight_map = {"a": "x.safetensors", "x": "x.safetensors", "y": "y.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UsageError, match=r"a is in [xy].safetensors and in [xy].safetensors; remove one"):
        SafetensorsFolder(tmp_path)


def test_ranks_share_the_check(tmp_path):
    manifest = {f"{n:03}": File(n * n, "") for n in range(40)} | {"empty": File(0, "")}
    shares = [share_of(manifest, rank, 6) for rank in range(6)]
    assert sorted(name for share in shares for name in share) == sorted(manifest)
    sizes = {name: record.bytes for name, record in manifest.items()}
    loads = [sum(map(sizes.get, share)) for share in shares]
    assert max(loads) - min(loads) < 40 * 40


def folder_of(directory: Path, there: list[int], tracker: int | None) -> Path:
    for iteration in there:
        iteration_directory(directory, iteration).mkdir(parents=True)
    if tracker is not None:
        (directory / TRACKER).write_text(str(tracker))
    return directory


@pytest.mark.parametrize(
    ("tracker", "keep_last", "interval", "deleted"),
    [
        (60, 2, None, [10, 20, 30, 40]),
        (60, 1, 20, [10, 30, 50]),
        (60, 3, 30, [10, 20]),
        (60, 9, None, []),
        (40, 1, None, [10, 20, 30]),  # 50 and 60 are of another run
        (None, 1, None, []),
        (55, 1, None, []),  # without the one it names none is deleted
    ],
)
def test_which_checkpoints_are_deleted(tmp_path, tracker, keep_last, interval, deleted):
    folder = folder_of(tmp_path, [10, 20, 30, 40, 50, 60], tracker)
    assert superseded(folder, keep_last, interval) == [iteration_directory(folder, n) for n in deleted]


def keep_some(directory: str) -> list[int]:
    args = training_case.case_args("llama", num_layers=1, save=directory, keep_last=2, save_retain_interval=3)
    with training_case.groups(args):
        state = training_case.build(args)
        for state.progress.iteration in range(1, 7):
            checkpoint.Save(args, state).finish()
    return iterations(directory)


def test_training_keeps_what_is_asked_for(ranks, tmp_path):
    assert ranks(1, keep_some, str(tmp_path)) == [[3, 5, 6]]
    assert latest_iteration(tmp_path) == 6
    assert {path.name for path in tmp_path.iterdir()} == {*(f"iter_000000{n}" for n in (3, 5, 6)), TRACKER}


def test_the_tool_verifies(damaged, run, capsys):
    assert tool.main(["verify", str(run)]) == 0
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{BEFORE} is complete",
        f"{LAST} is complete",
    ]
    for kind, (_, said) in DAMAGES.items():
        if "tracker" not in kind and kind != "nothing":
            assert tool.main(["verify", str(damaged[kind])]) == 1
            lines = capsys.readouterr().out.splitlines()
            assert lines[0].startswith(f"{BEFORE} is complete") and said.split(" (")[0] in lines[1], kind
            assert len(lines) == (5 if kind == "no shards" else 2)


def test_the_tool_lists(damaged, capsys):
    tool.main(["list", str(damaged["no shard"])])
    head, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["iteration", "size", "ranks", "strategy", "complete"]
    assert (first[0], *first[3:]) == ("2", "dp2", "ring", "yes")
    assert " ".join((*second[:2], *second[4:])) == "4 (latest) dp2 ring no: __0_0.distcp is missing"
    tool.main(["list", str(damaged["garbled tracker"])])
    assert f"{TRACKER} contains" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"^--dry-run: needs ACTION prune; add that"):
        tool.main(["list", str(damaged["no shard"]), "--dry-run"])


def test_the_tool_prunes(run, damaged, tmp_path, capsys):
    pruned = shutil.copytree(run, tmp_path / "pruned")
    tool.main(["prune", str(pruned), "--keep-last", "1", "--dry-run"])
    assert capsys.readouterr().out.startswith(f"would delete {BEFORE}, ")
    assert iterations(pruned) == [2, 4]
    tool.main(["prune", str(pruned), "--save-retain-interval", "2"])
    assert capsys.readouterr().out == "nothing to delete\n"
    tool.main(["prune", "--keep-last", "1", str(pruned)])
    assert iterations(pruned) == [4]
    for folder, flags, said in (
        (damaged["no shard"], ["--keep-last", "1"], "the latest is not complete"),
        (damaged["garbled tracker"], ["--keep-last", "1"], "contains"),
        (pruned, [], "give --keep-last 3"),
        (tmp_path, ["--keep-last", "1"], "contains no checkpoint"),
    ):
        with pytest.raises(UsageError, match=said):
            tool.main(["prune", str(folder), *flags])
