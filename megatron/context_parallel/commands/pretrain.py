"""Pretrain a GPT or Llama with context parallelism: `torchrun ... pretrain_gpt.py --help`."""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.pretrain()

import logging

from megatron.context_parallel.cli.run_main import announce, ignore_warnings_of_libraries, imports
from megatron.context_parallel.trainer.faults.lifetime import end_with_parent


def main(argv: list[str] | None = None) -> None:
    """Train, or with `--dry-run` only describe the run. Raises UsageError for invalid arguments."""
    ignore_warnings_of_libraries()
    end_with_parent()
    with imports():
        from megatron.context_parallel.trainer.arguments.complete import parse_args

    logging.basicConfig(format="%(message)s")
    logging.getLogger("megatron.context_parallel").setLevel(logging.INFO)
    args = parse_args(argv)
    if args.dry_run:
        from megatron.context_parallel.trainer.dry_run import describe as run
    else:
        announce(f"starting {args.world_size} ranks")
        with imports():
            from megatron.context_parallel.trainer.training import pretrain as run
    run(args)
