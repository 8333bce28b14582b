#!/usr/bin/env bash
# What the launch scripts of the model families share: bash examples/launch.sh PRESET STRATEGY [flags of pretrain_gpt.py]
# starts one rank per GPU here (4 on CPU without GPUs), or what LAUNCH says; see README.md beside this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($# < 2)) || [[ $1 == -* || $2 == -* ]]; then
    echo "pretrain.sh: need a preset and a strategy first, such as: llama2-7b ring --data-path PREFIX" >&2
    exit 2
fi
preset=$1 strategy=$2
shift 2
flags=" $* "

given() { # FLAG...: whether the caller gives one of them
    local flag
    for flag; do
        [[ $flags != *" $flag"[\ =]* ]] || return 0
    done
    return 1
}

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
if given --dry-run; then # one process, here, whatever LAUNCH says
    launch=(.venv/bin/python pretrain_gpt.py)
    [[ -n ${LAUNCH:-} ]] || export WORLD_SIZE=${WORLD_SIZE:-$ranks}
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Flags of the caller win; these cannot stand beside those that replace them.
sharding=(--use-distributed-optimizer) length=(--train-iters 1000) warmup=(--lr-warmup-fraction 0.01)
if given --use-torch-fsdp2; then sharding=(); fi
if given --train-samples; then length=(); fi
if given --lr-warmup-iters --lr-warmup-samples; then warmup=(); fi
if given --fp16; then precision=(); fi

exec "${launch[@]}" \
    --preset "$preset" --cp-strategy "$strategy" --context-parallel-size "$ranks" \
    "${precision[@]}" "${sharding[@]}" --micro-batch-size 1 "${length[@]}" \
    --lr-decay-style cosine "${warmup[@]}" \
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    "$@"
