"""The frames of a process that a signal ended: of Python, and native ones if there are a core dump and gdb."""

import faulthandler
import resource
import shutil
import subprocess
import sys
from pathlib import Path

_PATTERN = Path("/proc/sys/kernel/core_pattern")


def record_crash(path: Path) -> None:
    """Let this process write its Python frames to `path` and leave a core when a signal ends it."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    faulthandler.enable(path.open("w"))


def backtrace(path: Path, since: float) -> str:
    """The frames of a process that called `record_crash(path)`. The newest core dump after `since` is removed."""
    python = path.read_text() if path.exists() else ""
    cores = [core for core in _cores() if core.stat().st_mtime >= since]
    if not cores:
        return python
    core = max(cores, key=lambda core: core.stat().st_mtime)
    native = "no gdb here"
    if gdb := shutil.which("gdb"):
        command = [gdb, "--batch", "--quiet", "-ex", "backtrace 40", sys.executable, str(core)]
        native = subprocess.run(command, capture_output=True, text=True).stdout
    core.unlink()
    return f"{python}\n{native}"


def _cores() -> list[Path]:
    """Those that the system puts into a folder, not those that it gives to a program."""
    pattern = _PATTERN.read_text().strip() if _PATTERN.exists() else "|"
    if pattern.startswith("|"):
        return []
    folder, name = (Path.cwd() / pattern).parent, Path(pattern).name.partition("%")[0]
    return [path for path in folder.glob(f"{name}*") if path.is_file() and path.open("rb").read(4) == b"\x7fELF"]
