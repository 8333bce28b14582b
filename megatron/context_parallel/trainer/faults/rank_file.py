"""A small file for each running rank with its position. Other processes read it, even after the rank has died.

The files are in a temporary folder that only their user may open. A file is named after its process.
"""

import contextlib
import json
import mmap
import os
import socket
import sys
import tempfile
import threading
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import psutil

from megatron.context_parallel.patches.waiting_frames import awaited_by
from megatron.context_parallel.runtime.comm.flight_recorder import Position, recorder

_FOLDER = "megatron-context-parallel"
_PARTS = {"position": slice(0, 512), "looked up": slice(512, 2048), "rank": slice(2048, 4096)}


@dataclass(frozen=True)
class RankProcess:
    """A rank and its process."""

    rank: int
    world: int
    pid: int
    host: str
    job: str  # the same for all ranks of a job


class RankFile:
    """The file of this process. The recorder writes each note to it."""

    def __init__(self, rank: int, world: int, job: str) -> None:
        self.process = RankProcess(rank, world, os.getpid(), this_host(), job)
        self.path = _folder() / str(self.process.pid)
        try:
            self.memory = _mapped(self.path)
        except OSError as error:  # a full disk must not stop a job
            print(f"rank {rank}: cp-stuck cannot see it: {error}", file=sys.stderr, flush=True)
            self.memory = mmap.mmap(-1, _PARTS["rank"].stop)
        self._write("rank", json.dumps(asdict(self.process)))
        self._write("position", recorder.position.text)
        recorder.size = _PARTS["position"].stop
        recorder.memory = self.memory

    def look_up(self, threads: set[int]) -> Position:
        """The position of this process, and what its threads, except for `threads`, wait for outside of plans.

        If its GPU has not passed a wait of a plan yet, it is the position of that wait.
        """
        position = recorder.position
        if on_gpu := recorder.awaited_by_gpu:
            position = on_gpu._replace(notes=position.notes, done=position.done)
        position = _looked_up(position, threads)
        self._write("looked up", position.text)
        return position

    def _write(self, part: str, text: str) -> None:
        where = _PARTS[part]
        size = where.stop - where.start
        self.memory[where] = text.encode()[:size].ljust(size)

    def remove(self) -> None:
        recorder.memory = None
        self.path.unlink(missing_ok=True)


def this_host() -> str:
    """The name of this host and of its PID namespace: a container has its own."""
    return f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino if sys.platform == 'linux' else ''}"


def _mapped(path: Path) -> mmap.mmap:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.parent.lstat().st_uid != os.getuid() or path.parent.is_symlink():
        raise PermissionError(f"{path.parent} belongs to another user; set TMPDIR to your own directory")
    for other in path.parent.iterdir():
        if other.name.isdecimal() and not psutil.pid_exists(int(other.name)):
            other.unlink(missing_ok=True)
    with path.open("w+b") as file:
        os.posix_fallocate(
            file.fileno(), 0, _PARTS["rank"].stop
        )  # fails here on a full disk; a later write would be a SIGBUS
        return mmap.mmap(file.fileno(), 0)


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"{_FOLDER}-{os.getuid()}"


def read_rank_file(path: Path) -> tuple[RankProcess, Position]:
    """The rank of a file, and its position.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged.
    """
    content = path.read_bytes()
    texts = {part: content[where].decode().strip("\0 ") for part, where in _PARTS.items()}
    try:
        process = RankProcess(**json.loads(texts["rank"]))
        position = Position.read(texts["position"]) if texts["position"] else Position()
        if texts["looked up"] and (more := Position.read(texts["looked up"])).notes == position.notes:
            position = more
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return process, position


def rank_files() -> list[Path]:
    """The files of all ranks on this host that this user may read."""
    return sorted(path for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}-*/*") if os.access(path, os.R_OK))


def file_of(pid: int) -> Path:
    """The file of another process of this user."""
    return _folder() / str(pid)


# ------------------------------------------------------------------------------- what a thread waits for


def _looked_up(position: Position, threads: set[int]) -> Position:
    frames = {thread: frame for thread, frame in sys._current_frames().items() if thread not in threads}
    code = _place(frames[threading.main_thread().ident or 0])
    for frame in () if position.waits else frames.values():
        with contextlib.suppress(Exception):  # the frame of a running thread may change meanwhile
            if waits := awaited_by(frame):
                return position._replace(waits=waits, code=code)
    return position._replace(code=code)


def _place(innermost: FrameType) -> str:
    """The innermost frame outside of libraries, such as "next_batch (data.py:57)"."""
    chosen = innermost
    for frame, _ in traceback.walk_stack(innermost):
        if "context_parallel" in frame.f_code.co_filename or "megatron" in frame.f_code.co_filename:
            chosen = frame
            break
    return f"{chosen.f_code.co_name} ({Path(chosen.f_code.co_filename).name}:{chosen.f_lineno})"
