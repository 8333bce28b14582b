#!/usr/bin/env bash
# A Slurm of two nodes and a spare, each with its own host name and two networks, in namespaces of their own:
#   unshare --mount --pid --net --uts --fork --kill-child --mount-proc bash cluster.sh DIR
# It says "ready" and ends when its input does; all that runs in it ends with it. Nothing outside DIR is changed.
set -euo pipefail
dir=$1
here=$(dirname "${BASH_SOURCE[0]}")
mkdir -p "$dir"/{log,state,munge}

hostname control
mount -t tmpfs tmpfs /run
{
    echo "127.0.0.1 localhost"
    echo "10.77.0.9 control"
    for i in 1 2 3; do echo "10.77.0.$i n$i"; done
} >"$dir/hosts"
mount --bind "$dir/hosts" /etc/hosts

ip link set lo up
for net in slow fast; do
    ip link add "$net" type bridge
    ip link set "$net" up
done
ip addr add 10.77.0.9/24 dev slow
for i in 1 2 3; do
    ip netns add "n$i"
    ip -n "n$i" link set lo up
    for net in slow fast; do
        ip link add "$net$i" master "$net" type veth peer name "${net}0" netns "n$i"
        ip link set "$net$i" up
        ip -n "n$i" link set "${net}0" up
    done
    ip -n "n$i" addr add "10.77.0.$i/24" dev slow0
    ip -n "n$i" addr add "10.78.0.$i/24" dev fast0
done

head -c 1024 /dev/urandom >"$dir/munge/key"
chmod -R go= "$dir/munge"
munged --force --foreground --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munge/pid" \
    --log-file="$dir/munge/log" --seed-file="$dir/munge/seed" &
until [[ -S $dir/munge/socket ]]; do sleep 0.1; done

export SLURM_CONF=$dir/slurm.conf
sed "s|DIR|$dir|g" "$here/slurm.conf" >"$SLURM_CONF"
slurmctld -D >"$dir/log/start" 2>&1 &
for i in 1 2 3; do
    # shellcheck disable=SC2016  # $0 is the node
    nsenter --net="/run/netns/n$i" unshare --uts bash -c 'hostname "$0"; exec slurmd -D -N "$0"' "n$i" >"$dir/log/n$i" 2>&1 &
done
until [[ $(sinfo --noheader --partition=box --states=idle --format=%D 2>/dev/null) == 3 ]]; do sleep 0.2; done
echo ready
cat >/dev/null
