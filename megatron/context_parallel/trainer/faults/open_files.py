"""How many files and connections a rank may have open: `ulimit -n`."""

import resource

from megatron.context_parallel.errors import RankError

_LEAST = 128  # of a rank, beside its connections to other ranks; one of a job of two had 148


def open_files() -> int:
    """How many files and connections this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def allow_open_files(ranks: int) -> None:
    """Let this process have as many open files and connections as the system lets it, and see that they do for a job.

    Raises:
        RankError: they do not do for a job of so many ranks.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    needed = _LEAST + ranks
    if most != resource.RLIM_INFINITY and most < needed:
        raise RankError(f"ulimit -n {most}: each of {ranks} ranks needs at least {needed}; raise it, such as to 65536")
