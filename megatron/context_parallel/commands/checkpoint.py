"""List, verify or prune the checkpoints in a directory.

DIR is the `--save` directory of the training run.
"""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.checkpoint()

from pathlib import Path

from rich.filesize import decimal
from rich.table import Table

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.cli.run_main import announce
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.checkpoint.manifest import MANIFEST, content_faults, read_manifest
from megatron.context_parallel.trainer.checkpoint.store import (
    TRACKER,
    delete,
    existing,
    iteration_of,
    iterations,
    latest_iteration,
    quick_fault,
    read_saved_args,
    superseded,
)

PRUNES = "action=prune"


class CheckpointFlags(FlagSection):
    action: str = flag(
        "list: print iteration, size, layout, strategy, and whether it is complete; verify: read every file, "
        "report damaged ones, and exit with 1 if there are any; prune: delete old checkpoints, never the latest",
        option="ACTION",
        choices=("list", "verify", "prune"),
    )
    run: Path = flag("the --save directory of a training run", option="DIR", example="runs/quickstart")
    keep_last: int | None = flag("keep the last N checkpoints", needs=PRUNES, example=3)
    save_retain_interval: int | None = flag("keep iterations that are multiples of N", needs=PRUNES, example=1000)
    dry_run: bool = flag("only print which checkpoints would be deleted", False, needs=PRUNES)


PARSER = FlagParser(
    CheckpointFlags,
    __doc__,
    "ACTION DIR [flags]",
    ["list runs/quickstart", "prune runs/quickstart --keep-last 3 --dry-run"],
)


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run, oldest first.

    Raises UsageError when there is none.
    """
    found = [existing(directory, iteration) for iteration in iterations(directory)]
    if not found:
        raise UsageError(f"DIR {directory}: contains no checkpoint; give the --save directory of a training run")
    return found


def size_of(checkpoint: Path) -> int:
    """Bytes of all files in a checkpoint."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def list_checkpoints(run: Path) -> int:
    """Print a table of the checkpoints."""
    try:
        latest = latest_iteration(run)
    except UsageError as error:
        latest = None
        print(f"{run}: {error}")
    table = Table("iteration", "size", "ranks", "strategy", "complete")
    for checkpoint in checkpoints(run):
        number = iteration_of(checkpoint)
        mark = " (latest)" if number == latest else ""
        fault = quick_fault(checkpoint)
        complete = f"no: {fault.removeprefix(f'{checkpoint.name}/')}" if fault else "yes"
        table.add_row(f"{number}{mark}", decimal(size_of(checkpoint)), *_made(checkpoint), complete)
    show(table)
    return 0


def _made(checkpoint: Path) -> tuple[str, str]:
    """The parallel layout and the strategy that it was saved with."""
    try:
        saved = read_saved_args(checkpoint)
    except ValueError:
        return "?", "?"
    kinds = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "dp": "data"}
    sizes = {short: saved.get(f"{kind}_parallel_size", "?") for short, kind in kinds.items()}
    layout = " ".join(f"{short}{size}" for short, size in sizes.items() if size != 1)
    return layout or "1", str(saved.get("cp_strategy", "?"))


def verify(run: Path) -> int:
    """Read every file of every checkpoint, and print the faults. Returns 1 if there are any."""
    bad = 0
    for checkpoint in checkpoints(run):
        announce(f"verifying {checkpoint.name}, {decimal(size_of(checkpoint))}")
        faults = _faults(checkpoint)
        bad += bool(faults)
        verdict = "is complete" if (checkpoint / MANIFEST).exists() else "has no manifest and cannot be verified"
        print("\n".join(faults or [f"{checkpoint.name} {verdict}, {decimal(size_of(checkpoint))}"]), flush=True)
    return int(bad > 0)


def _faults(checkpoint: Path) -> list[str]:
    try:
        manifest = read_manifest(checkpoint) or {}
    except ValueError as error:
        return [f"{checkpoint.name}/{error}"]
    faults = [f"{checkpoint.name}/{fault}" for fault in content_faults(checkpoint, manifest, manifest)]
    return faults or [fault for fault in [quick_fault(checkpoint)] if fault]


def prune(run: Path, keep_last: int | None, retain_interval: int | None, dry_run: bool) -> int:
    """Delete checkpoints, oldest first, like training with these flags."""
    if not (keep_last or retain_interval):
        raise UsageError(f"DIR {run}: nothing to keep is named; give --keep-last 3, or --save-retain-interval 1000")
    checkpoints(run)
    latest = latest_iteration(run)
    if latest is None:
        raise UsageError(f"DIR {run}: there is no {TRACKER}, so the latest is unknown; write an iteration to it")
    if fault := quick_fault(existing(run, latest)):
        raise UsageError(f"DIR {run}: the latest is not complete: {fault}; write a complete iteration to {TRACKER}")
    gone = superseded(run, keep_last or 1, retain_interval)
    for checkpoint in gone:
        print(
            f"{'would delete' if dry_run else 'deleting'} {checkpoint.name}, {decimal(size_of(checkpoint))}", flush=True
        )
        if not dry_run:
            delete(checkpoint)
    if not gone:
        print("nothing to delete")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = PARSER.parse(argv)
    if args.action == "list":
        return list_checkpoints(args.run)
    if args.action == "verify":
        return verify(args.run)
    return prune(args.run, args.keep_last, args.save_retain_interval, args.dry_run)
