#!/usr/bin/env bash
# Predicts the attention of the five papers on one common cluster: writes docs/five_papers.md, the same at each run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
"${PYTHON:-.venv/bin/python}" -m examples.paper_tables.all_tables --only five_papers
