"""Generates text with a trained model: `cp-generate`, from a checkout."""

from megatron.context_parallel.commands.programs import generate

if __name__ == "__main__":
    generate()
