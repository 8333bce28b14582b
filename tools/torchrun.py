"""Starts the ranks of a job, and says little when one fails: `cp-torchrun`, from a checkout."""

from megatron.context_parallel.commands.programs import torchrun

if __name__ == "__main__":
    torchrun()
