"""The limit on the open files and connections of a rank: `ulimit -n`."""

import resource

from megatron.context_parallel.errors import RankError

_LEAST = 128  # per rank, beside its connections to other ranks; a rank of a job of two had 148


def open_files() -> int:
    """The number of files and connections that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def allow_open_files(ranks: int) -> None:
    """Raise this process's limit of open files to the system's maximum, and check that it is enough for the job.

    Raises:
        RankError: the limit is too low for so many ranks.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    needed = _LEAST + ranks
    if most != resource.RLIM_INFINITY and most < needed:
        raise RankError(f"ulimit -n {most}: each of {ranks} ranks needs at least {needed}; raise it to 65536")
