#!/usr/bin/env bash
# Install the clients of docs/serving.md, and run each against the server: bash tests/serving/clients.sh [pytest arguments]
# It takes minutes and 5 GB, most of it for vLLM. CLIENTS and VLLM are environments that exist already, if given.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ -z ${CLIENTS:-} ]]; then
    export CLIENTS=$PWD/build/clients/bin
    if [[ ! -e build/clients/installed ]]; then
        python3.11 -m venv build/clients
        build/clients/bin/python -m pip install -q 'lm_eval[api]' transformers litellm langchain-openai
        touch build/clients/installed
    fi
fi
if [[ -z ${VLLM:-} ]]; then
    bash tests/vllm/install.sh build/vllm
    export VLLM=$PWD/build/vllm/bin
fi
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -rs tests/serving/test_clients.py "$@"
