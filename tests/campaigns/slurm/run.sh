#!/usr/bin/env bash
# Run examples/slurm/pretrain.sbatch under a real Slurm on this machine. Root only; installs Debian's Slurm if it is missing.
#   bash tests/campaigns/slurm/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

needed="slurm-wlm munge iproute2"
if ((EUID == 0)) && ! command -v slurmctld >/dev/null; then
    # shellcheck disable=SC2086  # several words
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $needed; } \
        >/dev/null 2>&1 || echo "run.sh: cannot install $needed" >&2
fi
OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/campaigns/slurm -rs "$@"
