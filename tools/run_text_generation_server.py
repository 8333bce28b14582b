"""Serves a trained model over HTTP: `cp-run-text-generation-server`, from a checkout."""

from megatron.context_parallel.commands.programs import run_text_generation_server

if __name__ == "__main__":
    run_text_generation_server()
