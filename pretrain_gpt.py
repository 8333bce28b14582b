"""Pretrain a GPT or Llama with context parallelism: `torchrun ... pretrain_gpt.py --help`."""

import logging
import os
import sys
import time
import warnings

from megatron.context_parallel.errors import UsageError


def main() -> None:
    """Train, or with `--dry-run` only describe the run; a mistake in the arguments is one line and exit status 2."""
    # What the libraries say about each other's versions, on every rank, is not the user's to mend.
    warnings.filterwarnings("ignore", module=r"(megatron\.core|torch)\b")
    from megatron.context_parallel.trainer.arguments import parse_args

    logging.basicConfig(format="%(message)s")
    logging.getLogger("megatron.context_parallel").setLevel(logging.INFO)
    try:
        args = parse_args()
        if args.dry_run:
            from megatron.context_parallel.trainer.dry_run import describe as run
        else:
            from megatron.context_parallel.trainer.training import pretrain as run
        run(args)
    except UsageError as error:
        _leave(error)


def _leave(error: UsageError) -> None:
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # Rank 0 says it for all, and its exit ends the job. A rank still here then found a mistake of its node alone.
        time.sleep(30)
        error = f"rank {rank}: {error}"
    print(f"pretrain_gpt.py: error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
