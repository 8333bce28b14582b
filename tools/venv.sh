#!/usr/bin/env bash
# Make .venv, or bring it up to date with a requirements file, and install this project into it.
#   bash tools/venv.sh requirements.txt
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

requirements=${1:-requirements.txt}
stamp=.venv/installed-$requirements
if [[ -f $stamp ]] && cat requirements*.txt pyproject.toml | cmp --silent - "$stamp"; then
    exit
fi

for python in python3.11 python3.12 python3.13 python3; do
    if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
        break
    fi
    python=
done
if [[ -z $python ]]; then
    echo "venv.sh: no Python 3.11 to 3.13 found; install python3.11" >&2
    exit 1
fi

echo "installing $requirements into .venv with $("$python" --version); torch alone is 200 MB or more"
if ! nvidia-smi -L >/dev/null 2>&1 && [[ -z ${PIP_EXTRA_INDEX_URL:-} ]]; then
    echo "no NVIDIA GPU: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu would fetch a smaller torch"
fi
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
quiet=(-qq)
[[ ! -t 1 ]] || quiet=() # a person sees pip's progress
.venv/bin/python -m pip install "${quiet[@]}" --requirement "$requirements"
.venv/bin/python -m pip install -qq --no-deps --editable .
cat requirements*.txt pyproject.toml >"$stamp"
