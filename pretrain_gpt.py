"""Pretrains a GPT or Llama with context parallelism: `cp-pretrain`, from a checkout."""

from megatron.context_parallel.commands.programs import pretrain

if __name__ == "__main__":
    pretrain()
