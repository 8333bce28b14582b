"""How a failing rank ends: it prints one line and writes everything else to a log."""

import atexit
import os
import signal
import sys
from typing import NoReturn

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.torch_process_groups import default_store
from megatron.context_parallel.trainer.config.flags import Arguments

from .cause import describe_error
from .crash_log import crash_log, linger
from .watch import Watch

_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Connection was likely closed",
)


def leave_after(args: Arguments, error: BaseException, watch: Watch | None) -> NoReturn:
    """End this process with status 1 (2 for a UsageError) because of `error`.

    The rank that broke the job prints why. A rank that only lost a peer prints nothing. A UsageError is raised again if
    the program should print it: on rank 0, or before the watch has started.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would raise whenever another data worker ends
    if isinstance(error, UsageError):
        if watch:
            _leave_with(args, error, watch)
        elif args.rank:
            print(f"rank {args.rank}: error: {error}", file=sys.stderr, flush=True)
            os._exit(2)
        raise error
    kind = _kind(error)
    if watch:
        watch.fail(kind)
    try:
        details = f"details in {crash_log(args, error)}"
    except OSError as full:
        details = f"details could not be written: {full}"
    speaks = watch.may_speak() if watch else kind == "failed" and _is_first()
    if speaks:
        print(f"rank {args.rank}: {describe_error(error)}; {details}", file=sys.stderr, flush=True)
    if watch:
        watch.said()
        watch.leave()  # the judge waits until all ranks have the verdict
    if not speaks:
        linger()
    os._exit(1)


def _leave_with(args: Arguments, error: UsageError, watch: Watch) -> None:
    if args.world_size == 1:
        watch.leave()
        return
    watch.fail("usage")
    speaks = watch.may_speak()
    if speaks and not args.rank:
        atexit.register(watch.leave)  # after the program has printed it: the others end when they hear of it
        return
    if speaks:
        print(f"rank {args.rank}: error: {error}", file=sys.stderr, flush=True)
    watch.said()
    watch.leave()
    if not speaks:
        linger()
    os._exit(2)


def _kind(error: BaseException) -> str:
    """The value of `RankStatus.ended` for a rank that raises `error`."""
    text = str(error)
    if isinstance(error, RuntimeError) and any(words in text for words in _LOST_PEER):
        return "lost"
    waited = any(words in text.lower() for words in ("timed out", "wait timeout"))
    return "timeout" if isinstance(error, RuntimeError) and waited else "failed"


def _is_first() -> bool:
    try:
        return default_store().add("ranks that told of an error", 1) == 1
    except (RuntimeError, ValueError):  # the store is gone, or never existed
        return True
