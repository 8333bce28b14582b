#!/usr/bin/env bash
# Train a Llama with context parallelism:
#   bash examples/llama/pretrain.sh PRESET STRATEGY [flags of pretrain_gpt.py; they win over those below]
# Presets: llama-7b and its variants, llama2-7b, llama3-8b, llama3-405b, tiny-llama. Slurm, CPU: examples/README.md.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" "${@:1:2}" --lr 3e-4 --min-lr 3e-5 "${@:3}"
