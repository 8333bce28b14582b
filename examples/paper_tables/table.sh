#!/usr/bin/env bash
# What every table_N.sh and figure_N.sh calls: bash examples/paper_tables/table.sh PAPER TABLE [--mode run] ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore
exec "${PYTHON:-.venv/bin/python}" -m examples.paper_tables.tables "$@"
