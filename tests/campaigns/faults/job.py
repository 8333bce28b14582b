"""A training job whose ranks are forked from this process, and a record of all its output, files and processes.

This process imports once what a trainer needs (`warm`), so that a rank starts at once. The ranks have a launcher, as
with torchrun: their parent, in a session of its own.
"""

import atexit
import ctypes
import multiprocessing
import os
import re
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp

from megatron.context_parallel.cli.run_main import ignore_warnings_of_libraries, run_main
from megatron.context_parallel.commands import pretrain
from megatron.context_parallel.trainer.faults import crash_log
from tools.netlab import free_port
from tools.netlab.lab import NAMESPACES, SHAPED, Lab

from .moments import Fault, Watch, install, write_counts

LAUNCHER = -1  # its lines have this rank
GRACE = 5.0  # seconds after the last rank in which what it started must end
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_PR_SET_CHILD_SUBREAPER = 36
_IMPORTED_LATE = (  # by a rank, which would take seconds
    "megatron.context_parallel.trainer.arguments.complete",
    "megatron.context_parallel.trainer.training",
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.tokenizers.text",
    "torch.utils.tensorboard",
)


@dataclass(frozen=True)
class Line:
    """One line of output, its time (time.monotonic()), and its rank."""

    time: float
    rank: int
    text: str


@dataclass
class Outcome:
    """The outcome of a job. Times are those of time.monotonic()."""

    began: float
    statuses: dict[int, int] = field(default_factory=dict)  # exit status by rank; -9: killed; missing: never ended
    ends: dict[int, float] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    fired: float | None = None  # when the fault happened, if its moment came
    stopped: set[int] = field(default_factory=set)  # ranks that were stopped, and killed after all others had ended
    late: set[int] = field(default_factory=set)  # ranks that had not ended at the limit
    left: list[str] = field(default_factory=list)  # processes that outlived all ranks

    @property
    def text(self) -> str:
        return "\n".join(f"{line.time - self.began:7.3f} {line.rank:2d}| {line.text}" for line in self.lines)

    @property
    def after(self) -> list[Line]:
        """The lines after the fault, without those about progress made before it."""
        since = self.began if self.fired is None else self.fired
        told = re.compile(
            r"iteration +\d+/|memory: |(validation|test) at iteration|saved iteration|no checkpoint in|"
            r"loaded .*resuming|training: |starting \d+ ranks|--cp-attention-backend auto|"
            r"\[\S+gloo\S+\] ERROR failed to connect, willRetry=1"  # the library's own log
        )
        return [line for line in self.lines if line.time >= since and not told.match(line.text)]

    @property
    def seconds(self) -> float:
        """From the fault to the end of the last rank that ended by itself."""
        assert self.fired is not None
        ends = [end for rank, end in self.ends.items() if rank not in self.stopped]
        return max(ends, default=self.fired) - self.fired


def warm() -> None:
    """Import everything that a rank imports, and prepare for forking."""
    ignore_warnings_of_libraries()
    for module in _IMPORTED_LATE:
        import_module(module)
    adopt_orphans()
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"


def adopt_orphans() -> None:
    """Orphans of jobs become children of this process: `run_job` waits for them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_job(
    argv: list[str],
    ranks: int,
    fault: Fault | None = None,
    *,
    agent_store: bool = True,
    ends_others: bool = False,
    limit: float = 60.0,
    timeout: float | None = None,
    apart: bool = False,
    lab: Lab | None = None,
    meanwhile: Callable[[], None] | None = None,
    counts: Path | None = None,
    main: Callable[[list[str]], None] | None = None,
) -> Outcome:
    """Run `pretrain_gpt.py argv` on `ranks` ranks and wait for the end of all, `limit` seconds at most.

    agent_store: the launcher has the job's store, as torchrun's has; otherwise rank 0, as with srun.
    ends_others: the launcher sends SIGTERM to the others when a rank has failed, as torchrun does on its node.
        Otherwise they must end by themselves, as on another node.
    timeout: seconds, in place of --distributed-timeout-minutes, which is at least a minute.
    apart: each rank takes itself to be on a host of its own.
    lab: each rank is in a network namespace of it, and has its name as the name of its host.
    meanwhile: runs here when the fault happens, whose action waits for it (`wait_for_go`).
    counts: a directory that gets how many events of each phase every rank had.
    main: runs in place of the trainer's.
    """
    return _Job(_Start(argv, ranks, fault, agent_store, ends_others, timeout, apart, lab, counts, main)).watch(
        limit, meanwhile
    )


@dataclass
class _Start:
    """The code of the launcher and of the ranks, each in its own process."""

    argv: list[str]
    ranks: int
    fault: Fault | None
    agent_store: bool
    ends_others: bool
    timeout: float | None
    apart: bool
    lab: Lab | None
    counts: Path | None
    main: Callable[[list[str]], None] | None
    outputs: dict[int, int] = field(default_factory=dict)  # descriptors to write to, by rank
    tell_to: int = -1
    go: int = -1
    temporary: str = ""  # the folder of what ranks leave behind: crash logs without --save, sockets

    def tell(self, event: str) -> None:
        os.write(self.tell_to, f"{event}\n".encode())

    def launch(self) -> None:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        port = free_port()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(self.ranks), "OMP_NUM_THREADS": "1"}
        if self.agent_store:
            os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "faults"}
            os.environ |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
        running = {}
        for rank in range(self.ranks):
            pid = os.fork()
            if not pid:
                _leave(lambda rank=rank: self.run_rank(rank))
            running[pid] = rank
            self.tell(f"started {rank} {pid}")
        self._keep_only(self.outputs[LAUNCHER])
        store = None
        if self.agent_store:
            from torch.distributed import TCPStore

            store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        while running:
            pid, status = os.wait()
            self.tell(f"ended {running.pop(pid)} {os.waitstatus_to_exitcode(status)} {time.monotonic()}")
            if status and self.ends_others:
                for other in running:
                    os.kill(other, signal.SIGTERM)
        del store

    def run_rank(self, rank: int) -> None:
        if self.lab:
            _enter(self.lab.hosts[rank])
            os.environ |= {"MASTER_ADDR": self.lab.address(0), "GLOO_SOCKET_IFNAME": SHAPED, "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0" if self.lab else str(rank)}
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._keep_only(self.outputs[rank])
        sys.argv = ["pretrain_gpt.py", *self.argv]
        os.environ["FAULTS_GO"] = str(self.go)
        crash_log.mkdtemp = lambda prefix: mkdtemp(prefix=prefix, dir=self.temporary)
        multiprocessing.current_process()._config["tempdir"] = self.temporary
        watch = Watch(rank, self.fault, self.tell)
        flags = dict(zip(self.argv, self.argv[1:], strict=False))
        install(watch, flags.get("--save"), self.timeout, self.apart)
        try:
            run_main(lambda: (self.main or pretrain.main)(self.argv))
        finally:
            if self.counts:
                write_counts(watch, self.counts / f"{rank}.json")

    def _keep_only(self, output: int) -> None:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in enumerate((nothing, output, output)):
            os.dup2(descriptor, number)
        # Not closed: objects of the parent would close what got their numbers afterwards.
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in (self.tell_to, self.go):
                os.dup2(nothing, descriptor)
        # The parent's may be caught by pytest.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


class _Job:
    def __init__(self, start: _Start) -> None:
        self.ranks, self.outcome = start.ranks, Outcome(time.monotonic())
        self.selector = selectors.DefaultSelector()
        self.partial: dict[int, bytes] = {}
        pipes = {rank: os.pipe() for rank in (LAUNCHER, *range(start.ranks))}
        self.events, tell = os.pipe()
        go, self.go = os.pipe()
        outputs = {rank: write for rank, (_, write) in pipes.items()}
        self.temporary = mkdtemp(prefix="job-")
        start = replace(start, outputs=outputs, tell_to=tell, go=go, temporary=self.temporary)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pids: dict[int, int] = {}
        self.launcher = os.fork()
        if not self.launcher:
            _leave(start.launch)
        for rank, (read, write) in pipes.items():
            os.close(write)
            os.set_blocking(read, False)
            self.selector.register(read, selectors.EVENT_READ, rank)
        os.close(tell)
        os.close(go)
        os.set_blocking(self.events, False)
        self.selector.register(self.events, selectors.EVENT_READ, "event")

    def watch(self, limit: float, meanwhile: Callable[[], None] | None) -> Outcome:
        until = self.outcome.began + limit
        self.meanwhile = meanwhile
        while len(self.outcome.statuses) < self.ranks:
            self._read(0.02)
            self._reap()
            missing = {r: pid for r, pid in self.pids.items() if r not in self.outcome.statuses}
            if missing and len(self.pids) == self.ranks and all(_state(pid) == "T" for pid in missing.values()):
                self.outcome.stopped |= set(missing)
                self._kill(missing)
            elif time.monotonic() > until:
                self.outcome.late |= set(range(self.ranks)) - set(self.outcome.statuses)
                self._kill(missing)
                break
        self._end()
        return self.outcome

    def _kill(self, ranks: dict[int, int]) -> None:
        for pid in ranks.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _end(self) -> None:
        until = time.monotonic() + GRACE
        while (left := self._session()) and time.monotonic() < until:
            self._read(0.02)
            self._reap()
        self.outcome.left = list(left.values())
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self._session():
            self._reap()
            time.sleep(0.01)
        self._read(0.0)
        for descriptor in [key.fd for key in self.selector.get_map().values()]:
            self.selector.unregister(descriptor)
            os.close(descriptor)
        self.selector.close()
        os.close(self.go)
        shutil.rmtree(self.temporary)
        self.outcome.lines.sort(key=lambda line: line.time)

    def _reap(self) -> None:
        """Orphans of the job are this process's children."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for rank in [rank for rank, own in self.pids.items() if own == pid]:
                self._ended(rank, os.waitstatus_to_exitcode(status), time.monotonic())

    def _ended(self, rank: int, status: int, when: float) -> None:
        self.outcome.statuses.setdefault(rank, status)
        self.outcome.ends.setdefault(rank, when)

    def _session(self) -> dict[int, str]:
        """The running processes of the job. No process of a job leaves its session."""
        found = {}
        for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
            with suppress(OSError, IndexError):
                state, parent, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.launcher and (state != "Z" or int(parent) == os.getpid()):
                    command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                    found[pid] = f"{pid} ({self._role(pid)}, {state}) {command[:60]}"
        return found

    def _role(self, pid: int) -> str:
        if pid == self.launcher:
            return "launcher"
        return next((f"rank {rank}" for rank, own in self.pids.items() if own == pid), "child")

    def _read(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                self.selector.unregister(key.fd)
                os.close(key.fd)
            *whole, self.partial[key.fd] = (self.partial.get(key.fd, b"") + data).split(b"\n")
            if not data and self.partial[key.fd]:
                whole.append(self.partial.pop(key.fd))
            for line in whole:
                text = line.decode(errors="replace")
                if key.data == "event":
                    self._hear(*text.split())
                else:
                    self.outcome.lines.append(Line(time.monotonic(), key.data, text))

    def _hear(self, what: str, *values: str) -> None:
        if what == "started":
            self.pids[int(values[0])] = int(values[1])
        elif what == "ended":
            self._ended(int(values[0]), int(values[1]), float(values[2]))
        elif what == "fired":
            self.outcome.fired = self.outcome.fired or float(values[0])
            if self.meanwhile:
                self.meanwhile()
                os.write(self.go, b"go\n")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for_go() -> None:
    """The action of a fault that waits until `meanwhile` is done."""
    os.read(int(os.environ["FAULTS_GO"]), 3)


def _enter(namespace: str) -> None:
    """Make this process appear to be on a host of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), "cannot enter a namespace")
    socket.sethostname(namespace)


def _leave(action: Callable[[], None]) -> None:
    """Run `action` in this forked process and exit as a Python program does."""
    if pathlib := sys.modules.get("_pytest.pathlib"):
        atexit.unregister(pathlib.cleanup_numbered_dir)  # it removes what earlier runs of pytest left, for minutes
    status: object = 0
    try:
        action()
    except SystemExit as leaving:
        status = leaving.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 130 if isinstance(sys.exception(), KeyboardInterrupt) else 1
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)
