"""Fits a cluster's description to printed or measured numbers: `cp-calibrate`, from a checkout."""

from megatron.context_parallel.commands.programs import calibrate

if __name__ == "__main__":
    calibrate()
