"""Pretrain a GPT or Llama with context parallelism: `torchrun ... pretrain_gpt.py --help`."""

import os
import sys

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.arguments import parse_args


def main() -> None:
    """Train, or with `--dry-run` only describe the run; a mistake in the arguments is one line and exit status 2."""
    try:
        args = parse_args()
        if args.dry_run:
            from megatron.context_parallel.trainer.dry_run import describe as run
        else:
            from megatron.context_parallel.trainer.training import pretrain as run
        run(args)
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"pretrain_gpt.py: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
