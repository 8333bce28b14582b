#!/usr/bin/env bash
# Fine-tune a model of HuggingFace on chats, with context parallelism on 2 ranks, and convert it back.
#   bash examples/huggingface/finetune_chats.sh [MODEL CHATS.jsonl]
# MODEL is a folder of a supported model (docs/convert.md) whose tokenizer has a chat template (default: a small Llama
# of random weights, and chats about sums). RUN_DIR (default runs/chats) gets everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore

run=${RUN_DIR:-runs/chats}
model=${1:-$run/small_llama}
chats=${2:-$run/chats.jsonl}
if [[ -e $run/converted ]]; then
    echo "RUN_DIR $run: has an earlier run; give another RUN_DIR, or remove $run" >&2
    exit 2
fi
gpu=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
precision=()
((gpu == 0)) || precision=(--bf16)

if [[ $# == 0 && ! -f $chats ]]; then
    .venv/bin/python examples/huggingface/small_llama.py "$model"
    .venv/bin/python examples/huggingface/small_chats.py "$model" "$chats"
fi
.venv/bin/python tools/convert_hf.py to-megatron --load "$model" --save "$run/converted"

.venv/bin/python tools/torchrun.py --standalone --nproc-per-node 2 pretrain_gpt.py \
    --config "$run/converted/model.yaml" --finetune --load "$run/converted" --save "$run/trained" \
    --context-parallel-size 2 --cp-strategy lightseq --cp-place-documents "${precision[@]}" \
    --sft --data-path "$chats" --split 95,5,0 --eval-iters 1 --eval-interval 100 \
    --seq-length 512 --micro-batch-size 1 --global-batch-size 4 --train-iters "${STEPS:-40}" --lr 1e-3 --log-interval 10

.venv/bin/python tools/convert_hf.py to-hf --load "$run/trained" --save "$run/huggingface"
echo "transformers loads it: AutoModelForCausalLM.from_pretrained('$run/huggingface')"
