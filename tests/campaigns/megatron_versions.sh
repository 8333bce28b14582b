#!/usr/bin/env bash
# Run the tests of the integration with other releases of megatron-core; .venv keeps its own.
#   bash tests/campaigns/megatron_versions.sh [VERSION...]
# Of a release that needs a newer Python, names and signatures are looked up in the sources.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
versions=("$@")
((${#versions[@]})) || versions=(0.16.0 0.16.1 0.17.1 0.18.2 0.19.2)
tests=(tests/integration/test_megatron_lm.py tests/integration/test_model.py tests/trainer/test_training.py tests/trainer/test_checkpoint.py)
chosen="megatron_lm or test_model or packed or kept or learns or another_layout"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0

for version in "${versions[@]}"; do
    here=$folder/$version
    if .venv/bin/pip install --quiet --no-deps --target "$here" "megatron-core==$version" 2>/dev/null; then
        if PYTHONPATH=$here:$PWD OMP_NUM_THREADS=1 .venv/bin/python -m pytest "${tests[@]}" -k "$chosen" >"$here.log" 2>&1; then
            echo "$version: $(tail -1 "$here.log")"
        else
            echo "$version: fails"
            grep -E '^(E  |FAILED|ERROR)' "$here.log" | sort | uniq -c | sort -rn | head -8
            failed=1
        fi
        continue
    fi
    .venv/bin/pip download --quiet --no-deps --ignore-requires-python --only-binary :all: --python-version 3.12 \
        --platform manylinux_2_28_x86_64 --dest "$here" "megatron-core==$version" 2>/dev/null
    .venv/bin/python -m zipfile -e "$here"/*.whl "$here"
    echo "$version: signatures only: $(PYTHONPATH=$PWD .venv/bin/python -W ignore -m tests.campaigns.megatron_signatures "$here")"
done
exit "$failed"
