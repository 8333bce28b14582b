# shellcheck shell=bash
# How the ranks of a job start and where they meet. The scripts of this folder source it in the repository, `$repo`.

fail() {
    echo "${script:?}: $*" >&2
    exit 2
}

ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}
((ranks)) || fail "the job has no GPUs: submit with --gpus-per-node=8, or for ranks on CPUs with RANKS_PER_NODE=4"

python=${repo:?}/.venv/bin/python
container=()
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    python=python
    container=(--container-image="$CONTAINER_IMAGE" --container-workdir="$repo"
        --container-mounts="${CONTAINER_MOUNTS:-$repo:$repo}")
fi

find_meeting_point() { # sets MASTER_ADDR and MASTER_PORT: on the first node, where this script runs
    local hosts address starter
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export MASTER_ADDR=${hosts%%$'\n'*}
    if [[ -n ${GLOO_SOCKET_IFNAME:-} ]]; then # ranks meet on this network, not on that of the host name
        address=$(ip -4 -oneline addr show dev "$GLOO_SOCKET_IFNAME" 2>/dev/null | grep -om1 'inet [0-9.]*') ||
            fail "GLOO_SOCKET_IFNAME=$GLOO_SOCKET_IFNAME: no such interface with an IPv4 address on $HOSTNAME; it has:" \
                "$(ip -4 -brief addr | sed 's/[@ ].*//' | xargs)"
        MASTER_ADDR=${address#inet }
        export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$GLOO_SOCKET_IFNAME}
    fi
    starter=$repo/.venv/bin/python # of the host: the port is found outside of a container
    [[ -x $starter ]] || starter=python3
    read -r MASTER_PORT < <(exec "$starter" "$repo/examples/slurm/hold_port.py") ||
        fail "no port for the ranks to meet at on $HOSTNAME: $starter examples/slurm/hold_port.py found none"
    export MASTER_PORT OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}

start_ranks() { # PROGRAM FLAG...: in place of this shell, or of the one that runs it in the background
    # shellcheck disable=SC2016  # SLURM_NODEID differs from node to node
    exec srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${container[@]}" \
        bash -c 'exec "$0" -m torch.distributed.run --node-rank="$SLURM_NODEID" "$@"' "$python" \
        --nnodes="$SLURM_NNODES" --nproc-per-node="$ranks" \
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"
}
