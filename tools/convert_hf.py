"""Converts weights of HuggingFace to a checkpoint and back: `cp-convert-hf`, from a checkout."""

from megatron.context_parallel.commands.programs import convert_hf

if __name__ == "__main__":
    convert_hf()
