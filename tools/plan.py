"""Shows what strategies do: `cp-plan`, from a checkout."""

from megatron.context_parallel.commands.programs import plan

if __name__ == "__main__":
    plan()
