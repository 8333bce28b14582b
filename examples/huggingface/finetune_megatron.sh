#!/usr/bin/env bash
# Convert a model of HuggingFace, fine-tune it with context parallelism on 4 ranks, and convert it back.
#   bash examples/huggingface/finetune_megatron.sh [MODEL [TEXT]]
# MODEL is a folder of a supported model (docs/convert.md; default: a small Llama of random weights), TEXT a text or
# .jsonl file (default: a module of the Python standard library). RUN_DIR (default runs/finetune) gets everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore

run=${RUN_DIR:-runs/finetune}
model=${1:-$run/small_llama}
text=${2:-$(.venv/bin/python -c 'import argparse; print(argparse.__file__)')}
if [[ -e $run/converted ]]; then
    echo "RUN_DIR $run: has an earlier run; give another RUN_DIR, or remove $run" >&2
    exit 2
fi
gpu=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
precision=()
((gpu == 0)) || precision=(--bf16)

if [[ $# == 0 && ! -f $model/config.json ]]; then
    .venv/bin/python examples/huggingface/small_llama.py "$model"
fi
.venv/bin/python tools/convert_hf.py to-megatron --load "$model" --save "$run/converted"

mkdir -p "$run/data"
.venv/bin/python tools/preprocess_data.py --input "$text" --output-prefix "$run/data/corpus" --append-eod \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$(realpath "$model")"

.venv/bin/python tools/torchrun.py --standalone --nproc-per-node 4 pretrain_gpt.py \
    --config "$run/converted/model.yaml" --finetune --load "$run/converted" --save "$run/trained" \
    --context-parallel-size 4 --cp-strategy mesh "${precision[@]}" \
    --data-path "$run/data/corpus_text_document" --split 100,0,0 --eval-iters 0 \
    --seq-length 512 --micro-batch-size 1 --global-batch-size 2 --train-iters "${STEPS:-20}" --lr 1e-3 --log-interval 5

.venv/bin/python tools/convert_hf.py to-hf --load "$run/trained" --save "$run/huggingface"
echo "transformers loads it: AutoModelForCausalLM.from_pretrained('$run/huggingface')"
