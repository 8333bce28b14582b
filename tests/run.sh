#!/usr/bin/env bash
# Install what the tests need into .venv, lint, check types, and run every test.
#   bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/venv.sh requirements-dev.txt
unset PYTHONDONTWRITEBYTECODE # tests start many processes, which then import compiled modules
.venv/bin/ruff check
.venv/bin/ruff format --check
.venv/bin/mypy --num-workers 2 megatron/context_parallel
.venv/bin/lint-imports --no-logo
OMP_NUM_THREADS=1 .venv/bin/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@"
