#!/usr/bin/env bash
# Prefill ranks, vLLM and a proxy on this machine: bash examples/vllm/serve.sh FOLDER [flags of the prefill server]
# FOLDER is a HuggingFace folder. VLLM_PYTHON is the Python of vLLM's environment (tests/vllm/install.sh makes one).
#   RANKS=4 VLLM_PYTHON=/opt/vllm/bin/python bash examples/vllm/serve.sh path/to/Llama-3.1-8B --bf16
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if (($# < 1)) || [[ $1 == -* ]]; then
    echo "serve.sh: need a HuggingFace folder first, such as: path/to/Llama-3.1-8B" >&2
    exit 2
fi
model=$1
shift
vllm=${VLLM_PYTHON:?set it to the Python of vLLM\'s environment}
ranks=${RANKS:-2} port=${PORT:-8000} prefill=${PREFILL_PORT:-5000} decode=${DECODE_PORT:-8100}
name=$(basename "$(realpath "$model")")
export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

started=()
end_all() {
    kill "${started[@]}" 2>/dev/null || true
    wait
}
trap end_all EXIT
trap 'exit 143' TERM INT

.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    tools/run_text_generation_server.py --load "$model" --served-model-name "$name" --port "$prefill" \
    --handoff-host 127.0.0.1 "$@" &
started+=($!)
read -ra flags <<<"${VLLM_FLAGS:-}"
"$vllm" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name "$name" --host 127.0.0.1 \
    --port "$decode" --kv-transfer-config "$(<examples/vllm/connector.json)" "${flags[@]}" &
started+=($!)
"$vllm" examples/vllm/proxy.py --port "$port" --prefill "http://127.0.0.1:$prefill" \
    --decode "http://127.0.0.1:$decode" &
started+=($!)
echo "clients connect to http://127.0.0.1:$port/v1, when both servers are ready"
wait -n
