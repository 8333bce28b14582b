#!/usr/bin/env bash
# Build the sdist and from it the wheel, install that beside torch and numpy alone, and try it there.
#   bash tests/wheel.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repository=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

.venv/bin/python -m venv "$folder/env"
export PATH=$folder/env/bin:$PATH
unset PYTHONPATH
mapfile -t pins < <(grep -E '^(torch|numpy)==' requirements.txt)
pip install --quiet 'setuptools>=77' "${pins[@]}"
python -c "from setuptools.build_meta import build_sdist; build_sdist('$folder')" >"$folder/log" || cat "$folder/log"
cd "$folder"
pip wheel --quiet --no-deps --no-build-isolation ./*.tar.gz
pip install --quiet ./*.whl # with its dependencies: none may be missing
pip check >/dev/null

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 "$repository/tests/wheel_check.py"

refuses() {
    local expected=$1 status=0 said
    shift
    said=$("$@" 2>&1) || status=$?
    if [[ $status != 2 || $said != "$1: error: $expected" ]]; then
        echo "wheel.sh: $* ended with status $status and said: $said" >&2
        exit 1
    fi
}
extra="pip install 'megatron-context-parallel[train]'"
refuses "needs rich: $extra" cp-plan ring --ranks 4
refuses "needs pyyaml: $extra" cp-pretrain --preset tiny-llama
refuses "needs megatron-core: $extra" cp-preprocess-data --input none --output-prefix none
refuses "needs rich: $extra" cp-checkpoint list none
mkdir run
echo '{"iteration": 1, "lm_loss": 1.0}' >run/metrics.jsonl
refuses "needs matplotlib: $extra" cp-plot-loss run
refuses "needs rich: $extra" cp-plan-search --model llama3-8b
if ! nvidia-smi -L >/dev/null 2>&1; then
    refuses "needs a CUDA GPU, and this host has none; run it on a host with one" cp-gpu-check
fi
echo "wheel.sh: the wheel works without extras"
