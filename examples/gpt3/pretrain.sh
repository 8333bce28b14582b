#!/usr/bin/env bash
# Train a GPT-3 with context parallelism:
#   bash examples/gpt3/pretrain.sh PRESET STRATEGY [flags of pretrain_gpt.py; they win over those below]
# Presets: tiny-gpt3, gpt3-760m, gpt3-2.7b, gpt3-13b, gpt3-66b, gpt3-175b. Slurm, CPU: examples/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if (($# < 2)) || [[ $1 == -* || $2 == -* ]]; then
    echo "pretrain.sh: need a preset and a strategy: bash examples/gpt3/pretrain.sh gpt3-2.7b ring --data-path ..." >&2
    exit 2
fi
preset=$1 strategy=$2
shift 2

precision=(--bf16)
if [[ -n ${LAUNCH:-} ]]; then
    ranks=${RANKS_PER_NODE:?set it to the ranks per node of what LAUNCH starts, such as 8}
    read -ra launch <<<"$LAUNCH"
else
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    ranks=${RANKS_PER_NODE:-$((gpus ? gpus : 4))}
    launch=(.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$ranks" pretrain_gpt.py)
    ((gpus)) || precision=()
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec "${launch[@]}" \
    --preset "$preset" --cp-strategy "$strategy" --context-parallel-size "$ranks" \
    "${precision[@]}" --use-distributed-optimizer \
    --micro-batch-size 1 --train-iters 1000 \
    --lr 1.6e-4 --min-lr 1.6e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 \
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    "$@"
