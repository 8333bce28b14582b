"""Looks after a directory of checkpoints: `cp-checkpoint`, from a checkout."""

from megatron.context_parallel.commands.programs import checkpoint

if __name__ == "__main__":
    checkpoint()
