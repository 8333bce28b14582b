"""A less verbose torchrun: `cp-torchrun --nproc-per-node 8 pretrain_gpt.py ...` takes torchrun's arguments.

A failing rank prints its own error. torchrun adds 40 lines; this adds one, and only for a rank that a signal ended.
"""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.torchrun()

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(argv: list[str] | None = None) -> int:
    """The status of the first failed rank, 128 + N if signal N ended it or this launcher, and 0 if none failed."""
    logging.disable(logging.ERROR)
    try:
        run.main(argv)
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        print(f"rank {rank} was ended by {failure.signal_name()}", file=sys.stderr, flush=True)
        return 128 - failure.exitcode
    return 0
