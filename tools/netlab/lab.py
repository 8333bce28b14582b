"""A cluster of network namespaces, joined by a switch, with links of a given rate. See docs/netlab.md."""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megatron.context_parallel.errors import UsageError

from .launch import MAX_RANKS, describe, exit_on_signals, launch, rank_environment
from .traffic import INNER, SHAPED

NAMESPACES = Path("/run/netns")  # where `ip netns` keeps them
LABS = Path("/run/netlab")  # one file for each lab that is up
MASTER_PORT = 29500
MTU = 9000
MIN_BURST = 16 * 1024  # bytes; a tenth of it would cost a third of the rate
QUEUE_MS = 1000
QUEUE_PACKETS = 10000  # of a fair queue
ONE_FRAME = "gso_max_segs 1"  # queues take turns by packet: one of 64 KiB would get seven times the share of a frame
CONGESTION_CONTROL = "cubic"  # BBR retransmits behind a token bucket
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def check_root(command: str) -> None:
    if os.geteuid() != 0:
        raise UsageError(f"{command} needs root: put sudo before it, or use run --ranks 4, which needs no lab")
    for program in ("ip", "tc"):
        if not shutil.which(program):
            raise UsageError(f"{command} needs the program {program}: apt install iproute2")


def iproute(program: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Runs lines of `ip` or `tc` in a namespace. Raises UsageError with their output if one fails."""
    command = [program, *(["-n", namespace] if namespace else []), "-batch", "-"]
    lines = list(lines)
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if done.returncode:
        failed = re.search(r"Command failed -:(\d+)", done.stderr)
        line = lines[int(failed[1]) - 1] if failed else ""
        reason = done.stderr.splitlines()[0] if done.stderr else f"status {done.returncode}"
        raise UsageError(f"{program} {line}: {reason}; a lab needs a kernel and a container that let root do this")


def processes_inside(namespaces: Iterable[str]) -> list[int]:
    files = [os.stat(NAMESPACES / name) for name in namespaces]
    inodes = {(file.st_dev, file.st_ino) for file in files}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            file = os.stat(process / "ns/net")
        except OSError:  # it has ended
            continue
        if (file.st_dev, file.st_ino) in inodes:
            found.append(int(process.name))
    return found


@dataclass(frozen=True)
class Lab:
    """An emulated cluster; `with Lab(...) as lab:` in the main thread makes it and always removes it.

    `node_rate` is the rate of each NIC in each direction, as "100mbit" (units kbit, mbit, gbit); None: not limited.
    `nic` "node": the ranks of a node share its NIC and talk among themselves over its loopback. `nic` "rank": each rank
    has a NIC of its own, and an unlimited inner link to the other ranks of its node, as GPUs have NVLink.
    `fair`: the packets for different peers take turns at a NIC, as those of an RDMA adapter's connections do; otherwise
    they have one queue, as those of an Ethernet card. In one queue a small message waits behind large ones for others.
    Raises UsageError for values that cannot be.
    """

    nodes: int
    ranks_per_node: int
    node_rate: str | None = None
    nic: str = "node"
    name: str = "lab"
    fair: bool = False

    def __post_init__(self) -> None:
        for flag, value in (("--nodes", self.nodes), ("--ranks-per-node", self.ranks_per_node)):
            if value < 1:
                raise UsageError(f"{flag} {value}: give 1 or more")
        if self.ranks > MAX_RANKS:
            ranks = f"--nodes {self.nodes} --ranks-per-node {self.ranks_per_node}"
            raise UsageError(f"{ranks}: {self.ranks} ranks; give at most {MAX_RANKS} in total")
        if self.nic not in ("node", "rank"):
            raise UsageError(f"--nic {self.nic}: give node or rank")
        if not re.fullmatch(r"[A-Za-z0-9_]{1,40}", self.name):
            raise UsageError(f"--name {self.name}: give up to 40 letters, digits and underscores")
        if self.node_rate is not None and not self.rate:
            raise UsageError(
                f"--node-rate {self.node_rate}: give a number above 0 and a unit, as in 100mbit or 2.5gbit"
            )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def rate(self) -> int | None:
        """Bits per second of a NIC in one direction; None: not limited."""
        parts = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(UNITS)})", self.node_rate or "")
        return round(float(parts[1]) * UNITS[parts[2]]) if parts else None

    @property
    def burst(self) -> int | None:
        """Bytes of a full token bucket: a millisecond of the rate, but enough for a jumbo frame."""
        return self.rate and max(MIN_BURST, self.rate // 8000)

    @property
    def ranks_per_nic(self) -> int:
        return self.ranks_per_node if self.nic == "node" else 1

    @property
    def inner_links(self) -> bool:
        return self.ranks_per_node > self.ranks_per_nic

    @property
    def switch(self) -> str:
        return f"netlab-{self.name}-switch"

    @property
    def hosts(self) -> list[str]:
        """The namespaces that hold ranks, one for each NIC, in rank order."""
        return [f"netlab-{self.name}-{i}" for i in range(self.ranks // self.ranks_per_nic)]

    @property
    def state(self) -> Path:
        return LABS / f"{self.name}.json"

    def node_of(self, host: int) -> int:
        return host * self.ranks_per_nic // self.ranks_per_node

    def address(self, host: int) -> str:
        return f"10.77.{self.node_of(host)}.{host % (self.ranks_per_node // self.ranks_per_nic) + 1}"

    @classmethod
    def load(cls, name: str) -> Self | None:
        """The lab of this name that is up, or None."""
        path = LABS / f"{name}.json"
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def up(self) -> None:
        """Makes the cluster, all of it or nothing. Raises UsageError without root or iproute2, or for a name in use."""
        check_root("up")
        taken = [namespace for namespace in (self.switch, *self.hosts) if (NAMESPACES / namespace).exists()]
        if taken and not self.state.exists():
            raise UsageError(f"--name {self.name}: the namespace {taken[0]} is not of this lab; give another name")
        self._claim()
        try:
            iproute("ip", [f"netns add {namespace}" for namespace in (self.switch, *self.hosts)])
            iproute("ip", self._switch_lines(), self.switch)
            for host, namespace in enumerate(self.hosts):
                iproute("ip", self._host_lines(host), namespace)
            if self.rate:
                for host, namespace in enumerate(self.hosts):
                    iproute("tc", self._shape(f"port{host}", host, "src"), self.switch)
                    iproute("tc", self._shape(SHAPED, host, "dst"), namespace)
        except BaseException:
            self.down()
            raise

    def _shape(self, device: str, host: int, end: str) -> list[str]:
        """The rate of the NIC of a host in one direction; `end`: where a packet's address is that of the peer."""
        if not self.fair:
            return [f"qdisc add dev {device} root tbf rate {self.rate}bit burst {self.burst} latency {QUEUE_MS}ms"]
        whole = f"ceil {self.rate}bit burst {self.burst} cburst {self.burst} quantum {MTU}"
        lines = [
            f"qdisc add dev {device} root handle 1: htb default 1",
            f"class add dev {device} parent 1: classid 1:1 htb rate {self.rate}bit {whole}",
        ]
        own = "rate 1kbit"  # a queue borrows from the whole; a rate of its own would let a burst pass to each peer
        for peer in range(len(self.hosts)):
            if peer == host:
                continue
            queue = f"1:{peer + 2:x}"
            match = f"u32 match ip {end} {self.address(peer)}"
            lines += [
                f"class add dev {device} parent 1:1 classid {queue} htb {own} {whole}",
                f"qdisc add dev {device} parent {queue} pfifo limit {QUEUE_PACKETS}",
                f"filter add dev {device} parent 1: protocol ip prio 1 {match} flowid {queue}",
            ]
        return lines

    def _claim(self) -> None:
        """Writes the state file, complete or not at all, unless there is one."""
        LABS.mkdir(exist_ok=True)
        draft = self.state.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(dataclasses.asdict(self)))
        try:
            os.link(draft, self.state)
        except FileExistsError:
            raise UsageError(
                f"--name {self.name}: this lab is up already; take it down, or give another name"
            ) from None
        finally:
            draft.unlink()

    def _switch_lines(self) -> list[str]:
        """Bridges, and both ends of all links. All is made inside the namespaces: the host never sees a link."""
        bridges = {"wire"} | {f"node{self.node_of(i)}" for i in range(len(self.hosts)) if self.inner_links}
        lines = [f"link add {bridge} mtu {MTU} up type bridge" for bridge in sorted(bridges)]
        for i, namespace in enumerate(self.hosts):
            links = [("port", "wire", SHAPED)]
            links += [("inner", f"node{self.node_of(i)}", INNER)] if self.inner_links else []
            for port, bridge, interface in links:
                lines += [
                    f"link add {port}{i} mtu {MTU} type veth peer name {interface} mtu {MTU} netns {namespace}",
                    f"link set {port}{i} master {bridge} addrgenmode none up",
                ]
            if self.fair:
                lines.append(f"link set port{i} {ONE_FRAME}")
        return lines

    def _host_lines(self, host: int) -> list[str]:
        """One address, on the NIC; routes say that it reaches the other ranks of its node by the inner link."""
        address, node = self.address(host), self.node_of(host)
        options = f"src {address} congctl {CONGESTION_CONTROL}"
        lines = [
            "link set lo up",
            f"link set {SHAPED} addrgenmode none up",
            f"address add {address}/32 dev {SHAPED}",
            f"route add 10.77.0.0/16 dev {SHAPED} {options}",
        ]
        if self.fair:
            lines.append(f"link set {SHAPED} {ONE_FRAME}")
        if self.inner_links:
            lines += [f"link set {INNER} addrgenmode none up", f"route add 10.77.{node}.0/24 dev {INNER} {options}"]
        return lines

    def down(self) -> None:
        """Removes the cluster, whole or in part, and kills what runs in it. Does nothing when it is not up."""
        check_root("down")
        if self.load(self.name) != self:
            return
        there = [namespace for namespace in (self.switch, *self.hosts) if (NAMESPACES / namespace).exists()]
        while inside := processes_inside(there):
            for process in inside:
                os.kill(process, signal.SIGKILL)
            time.sleep(0.02)
        iproute("ip", [f"netns delete {namespace}" for namespace in there])
        self.state.unlink()

    def __enter__(self) -> Self:
        exit_on_signals()
        self.up()
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    def run(self, command: Sequence[str | Path]) -> None:
        """See `launch`. Raises UsageError too when the lab is not up, or runs a job that would share its links."""
        check_root("run")
        if self.load(self.name) != self:
            raise UsageError(f"--name {self.name}: this lab is not up; start it with up")
        ranks = []
        for rank in range(self.ranks):
            environment = rank_environment(
                rank, self.nodes, self.ranks_per_node, self.address(0), MASTER_PORT, interface=SHAPED
            )
            host = self.hosts[rank // self.ranks_per_nic]
            ranks.append({"namespace": str(NAMESPACES / host), "environment": environment})
        with self.state.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"--name {self.name}: this lab runs another job; wait for it, or use another lab"
                ) from None
            launch(ranks, command)

    def describe(self) -> dict:
        """See `describe`."""
        limits = {"rate_bits_per_second": self.rate, "burst_bytes": self.burst, "queue_ms": self.rate and QUEUE_MS}
        link = {"nic": self.nic, "fair": self.fair, "mtu": MTU, "congestion_control": CONGESTION_CONTROL}
        return describe(self.nodes, self.ranks_per_node, **link, **limits)

    def __str__(self) -> str:
        rate = f"at {self.node_rate}" if self.rate else "not limited"
        return f"{self.name}: {self.nodes} nodes x {self.ranks_per_node} ranks, one NIC per {self.nic}, {rate}"
