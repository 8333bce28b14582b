#!/usr/bin/env bash
# Install the dependencies, train a tokenizer, turn text into tokens, train a small Llama with context parallelism on 4 ranks,
# plot the loss and generate text.
#   bash examples/quickstart.sh                 train on the source files of Python's standard library
#   bash examples/quickstart.sh FILE_OR_FOLDER  train on your text or .jsonl
# Everything is written to RUN_DIR (default runs/quickstart). The same command again resumes.
set -euEo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run=${RUN_DIR:-runs/quickstart}
input=${1:-${DATA:-"the Python standard library"}}
prefix=$run/data/corpus
tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$run/data/tokenizer.model")
step="start"
trap 'echo "quickstart.sh: failed at the step: $step" >&2' ERR

begin() {
    step=$1
    printf '\n== %s\n' "$step"
}

preprocess() {
    local files=("$input")
    if [[ $input == "the Python standard library" ]]; then
        local library
        library=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
        mapfile -d '' files < <(find "$library" -name '*.py' -not -path '*-packages/*' \
            -not -path '*/test/*' -not -path '*/tests/*' -not -path '*/idle_test/*' \
            -not -path '*/encodings/*' -not -path '*/pydoc_data/*' -print0 | sort -z)
    fi
    .venv/bin/python examples/train_tokenizer.py "$run/data/tokenizer.model" "${files[@]}"
    .venv/bin/python tools/preprocess_data.py --input "${files[@]}" --output-prefix "$prefix" --append-eod "${tokenizer[@]}"
    printf '%s\n' "$input" >"$run/data/input"
}

begin "install the pinned dependencies into .venv"
bash tools/venv.sh requirements.txt

begin "train a tokenizer and turn $input into tokens"
if [[ ! -f $run/data/input ]]; then
    mkdir -p "$run/data"
    preprocess
elif [[ $(<"$run/data/input") == "$input" ]]; then
    echo "already done: $run/data"
else
    echo "$run has data of $(<"$run/data/input"); set RUN_DIR to another folder for $input" >&2
    false
fi

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
case $gpus in
    0) ranks=4 precision=() ;;
    1) ranks=1 precision=(--bf16) ;;
    2 | 3) ranks=2 precision=(--bf16) ;;
    *) ranks=4 precision=(--bf16) ;;
esac
# Too few documents to set some aside: train on all of them and leave validation out.
documents=$(sed -n 's/.*"documents": \([0-9]*\).*/\1/p' "${prefix}_text_document.json")
validation=()
((documents >= 100)) || validation=(--split "100,0,0" --eval-iters 0)

begin "train on $ranks ranks"
tracker=$run/latest_checkpointed_iteration.txt
iterations=$(sed -n 's/^train-iters: //p' megatron/context_parallel/trainer/config/presets/quickstart.yaml)
if [[ -f $tracker && $(<"$tracker") == "$iterations" ]]; then
    echo "already finished: remove $run to train anew"
else
    OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore .venv/bin/python tools/torchrun.py \
        --standalone --nproc-per-node "$ranks" pretrain_gpt.py \
        --preset quickstart --context-parallel-size "$ranks" --cp-strategy ring "${precision[@]}" \
        --data-path "${prefix}_text_document" "${tokenizer[@]}" --save "$run" --load "$run" \
        "${validation[@]}"
fi

begin "plot the loss"
.venv/bin/python tools/plot_loss.py "$run"

begin "generate"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore .venv/bin/python tools/torchrun.py --standalone --nproc-per-node "$ranks" \
    tools/generate.py --load "$run" --prompt "def read" "    def close(self" --max-new-tokens 100 --temperature 0.5 --stop $'\n\n'

cat <<END

checkpoint   $run/$(printf 'iter_%07d' "$(<"$tracker")")
everything   $run (TensorBoard: .venv/bin/tensorboard --logdir $run/tensorboard)

What to try next:
  .venv/bin/python tools/plan.py mesh:grid=2x2 --ranks 4 --html plan.html   # watch a strategy run
  .venv/bin/python tools/torchrun.py --nproc-per-node $ranks tools/generate.py --load $run --interactive
  RUN_DIR=runs/mine bash examples/quickstart.sh FILE_OR_FOLDER              # train on your own text
END
