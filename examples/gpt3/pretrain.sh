#!/usr/bin/env bash
# Train a GPT-3 with context parallelism:
#   bash examples/gpt3/pretrain.sh PRESET STRATEGY [flags of pretrain_gpt.py; they win over those below]
# Presets: gpt3-760m, gpt3-2.7b, gpt3-13b, gpt3-66b, gpt3-175b, tiny-gpt3. Slurm, CPU: examples/README.md.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" "${@:1:2}" --lr 1.6e-4 --min-lr 1.6e-5 "${@:3}"
