"""A directory of checkpoints: which exist, which are complete, which one to load, which to delete.

It holds `iter_0000100/` per save and `latest_checkpointed_iteration.txt`, the tracker, which names the last complete
one. Names with a suffix are not checkpoints: `.incomplete` is being written or deleted, `.replaced` will be deleted.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.config.flags import Arguments, Flags

from .manifest import MANIFEST, content_faults, read_manifest, size_faults

TRACKER = "latest_checkpointed_iteration.txt"
ARGUMENTS = "args.json"
_PARTS = ("metadata.json", ".metadata", "common.pt")  # files of megatron-core beside the shards
Fault = Callable[[Path], str | None]


def iteration_directory(directory: str | Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` is, or will be."""
    return Path(directory) / f"iter_{iteration:07d}"


def replaced(checkpoint: Path) -> Path:
    """The path of a checkpoint while another one of the same iteration replaces it."""
    return checkpoint.with_name(checkpoint.name + ".replaced")


def existing(directory: str | Path, iteration: int) -> Path:
    """The path of the checkpoint of `iteration`, even if a run was killed while replacing it."""
    final = iteration_directory(directory, iteration)
    return replaced(final) if not final.exists() and replaced(final).is_dir() else final


def latest_iteration(directory: str | Path) -> int | None:
    """The iteration the tracker names, or None if there is no tracker.

    Raises:
        UsageError: the tracker does not hold a number.
    """
    try:
        text = (Path(directory) / TRACKER).read_bytes().decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{TRACKER} cannot be read ({error.strerror})") from None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise UsageError(f"{TRACKER} contains {text[:20]!r}, not an iteration such as 100")
    return int(text)


def iterations(directory: str | Path) -> list[int]:
    """The iterations of all checkpoints in a directory, complete or not, in ascending order.

    Raises:
        UsageError: the directory cannot be read.
    """
    try:
        names = [path.name for path in Path(directory).iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"{directory} cannot be read ({error.strerror}); make it readable, or give another") from None
    matches = (re.fullmatch(r"iter_(\d{7,})(\.replaced)?", name) for name in names)
    return sorted({int(match[1]) for match in matches if match})


# ---------------------------------------------------------------------------------------------- which is complete


def quick_fault(checkpoint: Path) -> str | None:
    """Why a checkpoint is not complete, judged by names, sizes and its `args.json`; None if it is complete."""
    name = checkpoint.name
    try:
        if not checkpoint.is_dir():
            return f"{name} is missing"
        next(checkpoint.iterdir(), None)
    except OSError as error:  # of another user
        return f"{name} cannot be read ({error.strerror})"
    try:
        manifest = read_manifest(checkpoint)
    except ValueError as error:
        return f"{name}/{error}"
    if manifest is not None:
        faults = size_faults(checkpoint, manifest) or content_faults(
            checkpoint, manifest, manifest.keys() & {ARGUMENTS}
        )
        if faults:
            return faults_of(checkpoint, faults)
    try:
        saved = read_saved_args(checkpoint)
    except ValueError as error:
        return f"{name}/{error}"
    if manifest is not None:
        return None
    if "no_verify_checkpoint" in saved:  # it was saved by a version that writes manifests
        return f"{name}/{MANIFEST} is missing"
    missing = [part for part in _PARTS if not (checkpoint / part).is_file() or (checkpoint / part).stat().st_size == 0]
    return f"{name}/{missing[0]} is missing or empty" if missing else None


def faults_of(checkpoint: Path, faults: list[str]) -> str | None:
    """The first of the faults and the number of further ones; None without a fault."""
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{checkpoint.name}/{faults[0]}{more}" if faults else None


def plain_args(args: Arguments) -> dict[str, object]:
    """The arguments as JSON. Values that JSON cannot represent become text."""
    return json.loads(json.dumps(vars(args), default=str))


def read_saved_args(checkpoint: Path) -> dict:
    """The arguments a checkpoint was saved with.

    Raises:
        ValueError: they are missing or damaged; the message says how.
    """
    try:
        saved = json.loads((checkpoint / ARGUMENTS).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{ARGUMENTS} is missing") from None
    except OSError as error:
        raise ValueError(f"{ARGUMENTS} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict):
        raise ValueError(f"{ARGUMENTS} is damaged")
    return saved


# --------------------------------------------------------------------------------------------- which one to load


def saves_where_it_loads(args: Flags) -> bool:
    """Whether `--save` and `--load` are the same folder."""
    if args.save is None or args.load is None:
        return False
    return os.path.realpath(args.save) == os.path.realpath(args.load)


def loadable_checkpoints(args: Flags) -> tuple[list[Path], str | None]:
    """The checkpoints of `--load`, the preferred one first, then the fallbacks; and the tracker's fault, or None."""
    assert args.load is not None
    try:
        there = iterations(args.load)
    except UsageError as error:
        raise UsageError(f"--load {error}") from None
    wanted = args.ckpt_step
    fault = None
    if wanted is None:
        try:
            wanted = latest_iteration(args.load)
        except UsageError as error:
            fault = str(error)
    if wanted is None:
        order = there[::-1]
    else:
        before, after = [n for n in there if n < wanted], [n for n in there if n > wanted]
        order = [wanted, *before[::-1], *after[::-1]]
    return [existing(args.load, iteration) for iteration in order], fault


def choose_checkpoint(
    args: Flags, paths: list[Path], fault: str | None, fault_of: Fault, say: Callable[[str], None]
) -> Path | None:
    """The one of `loadable_checkpoints` to load: that of `--ckpt-step`, or of the tracker. None if there is none.

    If it is not complete, `--load-fallback` selects the newest complete one instead; `say` gets a line about that.

    Raises:
        UsageError: it is not complete; the message names a file and the newest complete checkpoint before it.
    """
    if not paths and not fault:
        return None
    if not fault:
        fault = fault_of(paths[0])
        if not fault:
            return paths[0]
        paths = paths[1:]
    other = next((path for path in paths if not fault_of(path)), None)
    if other and args.load_fallback:
        say(f"--load {args.load}: {fault}; loading {other.name} instead")
        return other
    advice = "no other checkpoint in it is complete; give another --load"
    if other:
        advice = f"give --ckpt-step {iteration_of(other)}, or --load-fallback"
    raise UsageError(f"--load {args.load}: {fault}; {advice}")


def iteration_of(checkpoint: Path) -> int:
    """The iteration in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("iter_").removesuffix(".replaced"))


# ---------------------------------------------------------------------------------------------- which to delete


def superseded(directory: str | Path, keep_last: int, retain_interval: int | None) -> list[Path]:
    """The checkpoints to delete, oldest first.

    The last `keep_last` up to the one that the tracker names are kept, and multiples of `retain_interval`. Iterations
    above the tracker's belong to another run and are kept too. Without a tracker nothing is deleted.

    Raises:
        UsageError: the tracker does not hold a number.
    """
    latest = latest_iteration(directory)
    if latest is None or not existing(directory, latest).is_dir():
        return []
    up_to = [iteration for iteration in iterations(directory) if iteration <= latest]
    gone = up_to[: -max(keep_last, 1)]
    return [existing(directory, n) for n in gone if not retain_interval or n % retain_interval]


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint. If that is interrupted, the rest does not look like a checkpoint."""
    doomed = checkpoint.with_name(checkpoint.name.removesuffix(".replaced") + ".incomplete")
    if doomed.exists():
        shutil.rmtree(doomed)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def clear_leftovers(directory: Path) -> None:
    """Delete the remains of interrupted saves and deletions, and restore a checkpoint that was being replaced."""
    for path in directory.glob("iter_*.incomplete"):
        shutil.rmtree(path)
    for path in directory.glob("iter_*.replaced"):
        final = path.with_name(path.name.removesuffix(".replaced"))
        if final.exists():
            delete(path)
        else:
            path.rename(final)
