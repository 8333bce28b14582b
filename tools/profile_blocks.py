"""Measures what the strategy mesh schedules by: `cp-profile-blocks`, from a checkout."""

from megatron.context_parallel.commands.programs import profile_blocks

if __name__ == "__main__":
    profile_blocks()
