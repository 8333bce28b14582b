#!/usr/bin/env bash
# Run all tests of the last commit with several releases of Python, torch and megatron-core, and write docs/versions.md.
#   bash tests/versions.sh                        every row of docs/versions.md that has no result in FOLDER yet
#   bash tests/versions.sh PYTHON TORCH MEGATRON  one row, such as: 3.12 2.15.0 0.19.2
# A row needs up to 9 GB in FOLDER (default /tmp/context-parallel-versions) and one hour; its environment is removed after
# it. After an interruption, the same command resumes. The status is 1 if a test of any row fails. If there is no CPU
# build of a torch, PyPI's GPU build is used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repository=$PWD
folder=${FOLDER:-/tmp/context-parallel-versions}
results=$folder/results
mkdir -p "$results"

rows=("3.13 2.15.0 0.19.2" "3.12 2.15.0 0.19.2" "3.11 2.13.0 0.16.1" "3.12 2.11.0 0.16.1" "3.12 2.14.0 0.18.2" "3.12 2.13.0 0.17.1")
if (($# == 3)); then
    rows=("$*")
    rm -f "$results/$1-$2-$3".*
elif (($#)); then
    echo "usage: bash tests/versions.sh [PYTHON TORCH MEGATRON]" >&2
    exit 2
fi

python_of() {
    if command -v pyenv >/dev/null; then
        PYENV_VERSION=$(pyenv versions --bare | grep "^$1\." | tail -1) pyenv which python
    else
        command -v "python$1"
    fi
}

install_row() {
    local python=$1 torch=$2 megatron=$3
    rm -rf env
    "$(python_of "$python")" -m venv env
    # torch brings its own Triton; a CPU build of torch brings none.
    grep -hvE '^(torch|megatron-core|triton)==|^-r ' "$repository"/requirements{,-dev}.txt >others.txt
    env/bin/pip install --quiet --requirement others.txt "torch==$torch" "megatron-core==$megatron" triton
    touch env/complete
}

take_commit() {
    rm -rf checkout
    git clone --quiet "$repository" checkout
    ln -s ../env checkout/.venv
    # The examples then leave the environment as it is.
    (cd checkout && cat requirements*.txt pyproject.toml >.venv/installed-requirements.txt)
    env/bin/pip install --quiet --no-deps --editable checkout
}

run_row() {
    local result=$results/$1-$2-$3
    mkdir -p "$folder/$1-$2-$3"
    cd "$folder/$1-$2-$3"
    [[ -e env/complete ]] || install_row "$@"
    take_commit
    cd checkout
    if [[ ! -e $result.jsonl ]]; then
        # All rows of a folder train on the same text.
        [[ -e $results/text.txt ]] || git ls-files -z 'megatron/*.py' | xargs -0 cat >"$results/text.txt"
        RUN_DIR=runs/quickstart bash examples/quickstart.sh "$results/text.txt" >"$result.quickstart.log" 2>&1
        cp runs/quickstart/metrics.jsonl "$result.jsonl"
    fi
    # Failed tests are counted in the table.
    OMP_NUM_THREADS=1 .venv/bin/python -m pytest --numprocesses "${PROCESSES:-2}" --dist loadfile \
        --junitxml "$result.part" >"$result.log" 2>&1 || true
    mv "$result.part" "$result.xml"
    cd "$repository"
    rm -rf "${folder:?}/$1-$2-$3"
}

failed=0
for row in "${rows[@]}"; do
    read -ra releases <<<"$row"
    if [[ ! -e $results/${row// /-}.xml ]]; then
        echo "Python ${releases[0]}, torch ${releases[1]}, megatron-core ${releases[2]}"
        (run_row "${releases[@]}")
    fi
    python3 tests/versions_page.py "$results" docs/versions.md || failed=1
done
exit "$failed"
