"""Turns text into training data: `cp-preprocess-data`, from a checkout."""

from megatron.context_parallel.commands.programs import preprocess_data

if __name__ == "__main__":
    preprocess_data()
