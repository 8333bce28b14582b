"""Shows where the ranks of running jobs are, and which the others wait for: `cp-stuck`, from a checkout."""

from megatron.context_parallel.commands.programs import stuck

if __name__ == "__main__":
    stuck()
