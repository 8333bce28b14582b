#!/usr/bin/env bash
# Build the sdist and from it the wheel, install that, and try it there.
#   bash tests/wheel.sh         beside torch and numpy alone
#   bash tests/wheel.sh PYTHON  in the environment of PYTHON, which has torch and megatron-core: pip changes none of its packages
set -euo pipefail
programs=$(cd "$(dirname "${1:-.}")" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repository=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
export OMP_NUM_THREADS=1

.venv/bin/python -m venv "$folder/build"
"$folder/build/bin/pip" install --quiet 'setuptools>=77'
"$folder/build/bin/python" -c "from setuptools.build_meta import build_sdist; build_sdist('$folder')" >"$folder/log" ||
    cat "$folder/log"
"$folder/build/bin/pip" wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" "$folder"/*.tar.gz
cd "$folder"
wheel=$(echo "$folder"/*.whl)

if (($#)); then
    export PATH=$programs:$PATH
    trap 'python -m pip uninstall --quiet --yes megatron-context-parallel; rm -rf "$folder"' EXIT
    python -m pip list --format freeze | grep -v '^megatron-context-parallel' >before
    python -m pip install --quiet "${wheel}[train]"
    python -m pip list --format freeze >after
    if grep -vxFf after before; then
        echo "wheel.sh: pip changed the packages above" >&2
        exit 1
    fi
    awk '/^```/ { inside = /python/; next } inside' "$repository/README.md" >example.py
    echo 'assert (out - one.permute(2, 0, 1, 3)).abs().max() < 1e-6' >>example.py
    python example.py
    cp-torchrun --standalone --nproc-per-node 2 --no-python cp-pretrain --preset tiny-llama --mock-data --train-iters 5 --lr 1e-3 \
        --micro-batch-size 1 --context-parallel-size 2 --cp-strategy mesh --save run
    cp-checkpoint verify run
    cp -r "$repository"/{examples,docs,paper_tables_out} .
    PYTHONWARNINGS=ignore python -m examples.paper_tables.all_tables --only tables >tables.log
    diff --recursive --exclude '*.png' --exclude __pycache__ paper_tables_out "$repository/paper_tables_out"
    echo "wheel.sh: the wheel works with $(python -c 'import torch; print("torch", torch.__version__)')"
    exit
fi

"$repository/.venv/bin/python" -m venv env
export PATH=$folder/env/bin:$PATH
mapfile -t pins < <(grep -E '^(torch|numpy)==' "$repository/requirements.txt")
pip install --quiet "${pins[@]}"
pip install --quiet "$wheel" # with its dependencies: none may be missing
pip check >/dev/null

torchrun --standalone --nproc-per-node 4 "$repository/tests/wheel_check.py"

refuses() {
    local expected=$1 status=0 said
    shift
    said=$("$@" 2>&1) || status=$?
    if [[ $status != 2 || ${said##*$'\n'} != "$1: error: $expected" ]]; then
        echo "wheel.sh: $* ended with status $status and said: $said" >&2
        exit 1
    fi
}
extra="pip install 'megatron-context-parallel[train]'"
refuses "needs rich: $extra" cp-plan ring --ranks 4
refuses "needs pyyaml: $extra" cp-pretrain --preset tiny-llama
refuses "needs megatron-core: $extra" cp-preprocess-data --input "$repository/README.md" --output-prefix none
refuses "needs rich: $extra" cp-checkpoint list none
mkdir run
echo '{"iteration": 1, "lm_loss": 1.0}' >run/metrics.jsonl
refuses "needs matplotlib: $extra" cp-plot-loss run
refuses "needs rich: $extra" cp-plan-search --model llama3-8b
if ! nvidia-smi -L >/dev/null 2>&1; then
    refuses "needs a CUDA GPU, and this host has none; run it on a host with one" cp-gpu-check
fi
echo "wheel.sh: the wheel works without extras"
