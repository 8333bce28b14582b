#!/usr/bin/env bash
# Predicts every table of the papers: writes paper_tables_out/ and docs/reproduction.md, the same at each run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
"${PYTHON:-.venv/bin/python}" -m examples.paper_tables.all_tables
