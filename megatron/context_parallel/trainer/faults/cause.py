"""The cause behind the error of a rank: a data worker that ended, too few open files, no shared memory."""

import errno
import re
from collections.abc import Iterator

from megatron.context_parallel.trainer.data.worker_end import NO_ROOM, is_limit_of_files

from .open_files import open_files

_ENDED = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([\w ]+)")
_LEFT = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) exited unexpectedly(?: with exit code (\d+))?")
_IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")
_OF_SIGNAL = {  # why the system sends it, and a remedy
    "Killed": ", which the system sends when memory runs out; give a smaller --num-workers, or more memory",
    "Bus error": ", which the system sends when /dev/shm is full; free space there, or give --num-workers 0",
}


def describe_error(error: BaseException) -> str:
    """An error in one line: its known cause, or else its type and the first line of its message.

    An error of a data worker may surface anywhere in the main thread, so the chain of other errors is searched too.
    """
    chain = [*_chain(error)]
    text = "\n".join(str(one) for one in chain)
    ended = _ENDED.search(text)
    left = max(_LEFT.finditer(text), key=lambda found: found[2] or "", default=None)
    status = int(left[2] or 0) if left else 0
    if status == errno.EMFILE or is_limit_of_files(chain):
        return f"ulimit -n {open_files()} is too low to open more files and connections; raise it to 65536"
    if status == errno.ENOSPC or NO_ROOM in text:
        return "/dev/shm is too full for a batch of a data worker; free space there, or give --num-workers 0"
    if ended:
        return f"its data worker (process {ended[1]}) was ended by a signal ({ended[2]}){_OF_SIGNAL.get(ended[2], '')}"
    if left:
        return f"its data worker (process {left[1]}) ended" + (f" with status {status}" if status else "")
    return _line_of(error)


def _line_of(error: BaseException) -> str:
    """The type of an error and the first line of its message; for an error in a data worker, those of the original."""
    message = str(error).strip()
    if _IN_WORKER.match(message):
        return f"in a data worker, {message.splitlines()[-1]}"[:400]
    return f"{type(error).__name__}: {message}".partition("\n")[0][:400].rstrip(": ")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__
