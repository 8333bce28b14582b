"""Pretrain a GPT or Llama with context parallelism: `torchrun ... pretrain_gpt.py --help`."""

import logging
import warnings

from megatron.context_parallel.trainer.lifetime import end_with_parent


def main(argv: list[str] | None = None) -> None:
    """Train, or with `--dry-run` only describe the run. Raises UsageError for a mistake in the arguments."""
    # What the libraries say about each other's versions, on every rank, is not the user's to mend.
    warnings.filterwarnings("ignore", module=r"(megatron\.core|torch)\b")
    end_with_parent()
    from megatron.context_parallel.trainer.arguments import parse_args

    logging.basicConfig(format="%(message)s")
    logging.getLogger("megatron.context_parallel").setLevel(logging.INFO)
    args = parse_args(argv)
    if args.dry_run:
        from megatron.context_parallel.trainer.dry_run import describe as run
    else:
        from megatron.context_parallel.trainer.training import pretrain as run
    run(args)
