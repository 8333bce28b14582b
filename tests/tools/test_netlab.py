"""tools/netlab: clusters that leave nothing behind, links that bind, jobs that end as a whole."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.context_parallel import UsageError
from tools.netlab import Lab, Loopback, interface_bytes, launch_ranks
from tools.netlab.__main__ import main
from tools.netlab.lab import LABS, NAMESPACES, processes_inside

ROOT = Path(__file__).parents[2]
TOOL = [sys.executable, "-m", "tools.netlab"]
NAME = f"test{os.getpid()}"

try:
    subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], check=True, capture_output=True)
    CAN = True
except (FileNotFoundError, subprocess.CalledProcessError):
    CAN = False
needs_lab = pytest.mark.skipif(not CAN, reason="a lab needs root, iproute2, and the right to make network namespaces")

# Every rank sends its pid, and that of a child, to the test. Rank 1 then does as told; rank 0 waits for it.
PIDS = """
import os, signal, subprocess, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
child = subprocess.Popen(["sleep", "600"])
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
    print(os.getpid(), child.pid, file=file)
dist.barrier()
if dist.get_rank() == 1:
    exec(sys.argv[2])
dist.recv(torch.ones(1), src=1)
"""

# Each phase: (MiB, pairs of sender and receiver that start together), moved over gloo.
TRAFFIC = """
import json, os, sys, time
import torch, torch.distributed as dist
from tools.netlab import interface_bytes
dist.init_process_group("gloo")
rank, phases = dist.get_rank(), json.loads(sys.argv[2])
results = []
for size, pairs in phases:
    data = torch.zeros(size << 20, dtype=torch.uint8)
    into = [torch.zeros_like(data) for source, target in pairs if target == rank]
    before = interface_bytes()
    dist.barrier()
    start = time.monotonic()
    jobs = [dist.irecv(x, source) for x, (source, _) in zip(into, [p for p in pairs if p[1] == rank], strict=True)]
    jobs += [dist.isend(data, target) for source, target in pairs if source == rank]
    for job in jobs:
        job.wait()
    dist.barrier()
    seconds, after = time.monotonic() - start, interface_bytes()
    moved = {name: [now - then for now, then in zip(after[name], before[name], strict=True)] for name in after}
    results.append({"seconds": seconds, "bytes": moved})
json.dump(results, open(f"{sys.argv[1]}/{rank}", "w"))
"""

# In a single write: where Python does not buffer, print writes word by word, and the lines of the ranks mix.
REPORT = """
import os, sys
keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"]
words = [os.environ[key] for key in keys] + [str(sys.argv[1:])]
os.write(1, f"{' '.join(words)}\\n".encode())
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script, and a folder for its results; ranks find `tools` as the tests do."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "out").mkdir()

    def write(source: str) -> tuple[str, Path]:
        (tmp_path / "ranks.py").write_text(source)
        return str(tmp_path / "ranks.py"), tmp_path / "out"

    return write


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(condition, what: str) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"not within 30 s: {what}")


def pids(out: Path, ranks: int) -> list[int]:
    """Of all ranks and their children, once all have started."""
    until(lambda: sum(len(f.read_text().split()) for f in out.iterdir()) == 2 * ranks, "ranks started")
    return [int(word) for f in out.iterdir() for word in f.read_text().split()]


def network() -> tuple[set[str], ...]:
    """Links of this host; namespaces and state files of these tests."""
    found = [{path.name for path in Path("/sys/class/net").glob("*")}]
    for folder in (NAMESPACES, LABS):
        found.append({path.name for path in Path(folder).glob(f"*{NAME}*")})
    return tuple(found)


def shapes(lab: Lab) -> list[tuple[int, int]]:
    """(bit/s, bytes of burst) of each token bucket of the lab, and of each queue of a fair link."""
    found = []
    for namespace in (lab.switch, *lab.hosts):
        told = subprocess.check_output(["tc", "-n", namespace, "-json", "qdisc", "show"])
        found += [(q["options"]["rate"] * 8, q["options"]["burst"]) for q in json.loads(told) if q["kind"] == "tbf"]
        devices = {q["dev"] for q in json.loads(told) if q["kind"] == "htb"}
        for device in sorted(devices):
            classes = subprocess.check_output(["tc", "-n", namespace, "class", "show", "dev", device], text=True)
            (link,) = json.loads(
                subprocess.check_output(["ip", "-n", namespace, "-json", "-d", "link", "show", device])
            )
            assert link["gso_max_segs"] == 1  # else a turn of long messages is several frames
            ceilings = re.findall(r"rate (\S+) ceil (\d+)Mbit burst \d+\S* cburst (\S+)", classes)
            assert sum(own != "1Kbit" for own, _, _ in ceilings) == 1  # else a burst to each peer passes
            found += [(int(rate) * 10**6, 2**14 if burst == "16Kb" else burst) for _, rate, burst in ceilings]
    return found


@needs_lab
def test_up_and_down_leave_what_is_not_theirs(script, capsys):
    path, _ = script("")
    foreign = f"netlab-{NAME}-foreign"
    subprocess.run(["ip", "netns", "add", foreign], check=True)
    stranger = subprocess.Popen(["nsenter", f"--net=/run/netns/{foreign}", "sleep", "600"])
    other = Lab(2, 1, name=f"{NAME}b")
    try:
        other.up()
        before = network()
        lab = Lab(2, 2, "100mbit", "rank", NAME)
        lab.up()
        inside = subprocess.Popen(["nsenter", f"--net=/run/netns/{lab.hosts[1]}", "sleep", "600"])
        until(lambda: processes_inside(lab.hosts) == [inside.pid], "the sleeper is inside")
        assert network()[1] - before[1] == {lab.switch, *lab.hosts} and len(lab.hosts) == 4
        main(["status"])
        assert f"{NAME}: 2 nodes x 2 ranks, one NIC per rank, at 100mbit, 1 processes" in capsys.readouterr().out
        with pytest.raises(UsageError, match="is up already"):
            Lab(1, 1, name=NAME).up()
        with pytest.raises(UsageError, match="is not up"):
            Lab(1, 1, name=NAME).run([path])
        main(["down", "--name", NAME])
        assert inside.wait() == -signal.SIGKILL
        assert network() == before
        main(["down", "--name", NAME])
        assert network() == before and stranger.poll() is None
        assert Lab.load(other.name) == other
    finally:
        stranger.kill()
        subprocess.run(["ip", "netns", "delete", foreign], check=True)
        other.down()


@needs_lab
def test_up_is_all_or_nothing(monkeypatch):
    before = network()
    monkeypatch.setattr(Lab, "_host_lines", lambda lab, host: ["link set lo up"] + ["link set none up"] * host)
    with pytest.raises(UsageError, match=r"^ip link set none up: Cannot find device"):
        Lab(2, 1, name=NAME).up()
    assert network() == before
    subprocess.run(["ip", "netns", "add", f"netlab-{NAME}-1"], check=True)
    with pytest.raises(UsageError, match=f"--name {NAME}: the namespace netlab-{NAME}-1 is not of this lab"):
        Lab(2, 1, name=NAME).up()
    subprocess.run(["ip", "netns", "delete", f"netlab-{NAME}-1"], check=True)
    assert network() == before


@needs_lab
@pytest.mark.parametrize(("nic", "fair"), [("node", False), ("rank", True)])
def test_links_bind_and_inner_traffic_stays_inside(nic, fair, script):
    path, out = script(TRAFFIC)
    mates, across, back, incast = [[0, 1], [3, 2]], [[0, 2], [1, 3]], [[2, 0], [3, 1]], [[0, 3], [1, 3]]
    with Lab(2, 2, "40mbit", nic, NAME, fair) as lab:
        ends = 2 * len(lab.hosts)
        expected = [(40 * 10**6, pytest.approx(16384, abs=16))] * ends
        if fair:  # the whole link, and a queue for each peer
            expected = [entry for entry in expected for _ in lab.hosts]
        assert shapes(lab) == expected
        lab.run([path, out, json.dumps([[4, mates], [1, across], [1, back], [1, incast]])])
    ranks = [json.loads((out / str(rank)).read_text()) for rank in range(4)]
    MiB, small = 2**20, 30000  # barriers, acknowledgements
    sharing = 2 if nic == "node" else 1

    for rank, phases in enumerate(ranks):
        assert set(phases[0]["bytes"]) == ({"shaped", "inner"} if nic == "rank" else {"shaped"})
        assert max(phases[0]["bytes"]["shaped"]) < small
        if nic == "rank":
            received, sent = phases[0]["bytes"]["inner"]
            assert (received > 4 * MiB) == (rank in (1, 2)) and (sent > 4 * MiB) == (rank in (0, 3))
        received, sent = phases[1]["bytes"]["shaped"]
        assert sharing * MiB * (rank in (2, 3)) <= received <= sharing * MiB * (rank in (2, 3)) * 1.03 + small
        assert sharing * MiB * (rank in (0, 1)) <= sent <= sharing * MiB * (rank in (0, 1)) * 1.03 + small
    assert 2 * MiB <= ranks[3][3]["bytes"]["shaped"][0] <= 2 * MiB * 1.03 + small

    # No faster than full token buckets allow: out of a node, into it, and where two senders meet.
    for phase, load in ((1, sharing), (2, sharing), (3, 2)):
        assert max(phases[phase]["seconds"] for phases in ranks) > (load * MiB - 2 * lab.burst) * 8 / lab.rate


@needs_lab
def test_a_job_in_a_lab(script, capfd):
    path, _ = script(REPORT)
    with Lab(2, 2, name=NAME) as lab:
        main(["run", "--name", NAME, "--", path, "--flag", "-1"])
        with lab.state.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(UsageError, match="runs another job"):
                lab.run([path])
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"{r} {r % 2} 4 2 10.77.0.1 shaped ['--flag', '-1']" for r in range(4)]


@pytest.mark.parametrize(
    ("action", "status", "words"),
    [
        ("raise ValueError('the cause')", 1, "failed with status 1; .*\nValueError: the cause"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL; "),
    ],
)
def test_first_failure_ends_the_job(action, status, words, script, capfd):
    path, out = script(PIDS)
    with pytest.raises(subprocess.CalledProcessError) as error:
        Loopback(3).run([path, out, action])
    assert error.value.returncode == status
    told = capfd.readouterr().err
    assert re.search(rf"(?s)\Anetlab: rank 1 {words}", told), told
    assert "rank 0" not in told and "rank 2" not in told and "launch_ranks" not in told
    until(lambda: not any(map(alive, pids(out, 3))), "all are gone")


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("import os, sys; assert (os.environ['RANK'], sys.argv[1]) == ('3', '-x')", 0, ""),
        ("1 +", 1, "SyntaxError: invalid syntax\n"),
    ],
)
def test_exit_of_a_script(source, status, words, script, monkeypatch):
    path, _ = script(source)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, told = launch_ranks.run_script({"namespace": None, "environment": {"RANK": "3"}}, [path, "-x"])
    assert code == status and told.endswith(words) and bool(told) == bool(words)


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_down_ranks_and_lab(number, script, tmp_path):
    before = network()
    path, out = script(PIDS)
    command = [path, str(out), "while 1: 0"]
    # A job that a script started in the background ignores it.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heard}\nfrom tools.netlab import Lab\nwith Lab(2, 1, name='{NAME}') as lab:\n lab.run({command})"
    benchmark = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    started = pids(out, 2)
    assert all(map(alive, started)) and network() != before
    benchmark.send_signal(number)
    assert benchmark.wait(60) != 0
    assert not any(map(alive, started)) and network() == before


def test_ranks_do_not_outlive_a_killed_tool(script):
    path, out = script(PIDS)
    tool = subprocess.Popen([*TOOL, "run", "--ranks", "2", "--", path, out, "while 1: 0"])
    started = pids(out, 2)
    tool.kill()
    until(lambda: not any(map(alive, started)), "all are gone")


def test_shape_of_a_link():
    assert [Lab(1, 1, rate).rate for rate in (None, "64kbit", "100mbit", "2.5gbit")] == [None, 64000, 10**8, 25 * 10**8]
    assert [Lab(1, 1, rate).burst for rate in (None, "100mbit", "1gbit")] == [None, 16384, 125000]
    lab = Lab(2, 4, "100mbit", "rank")
    assert [lab.address(host) for host in (0, 3, 4)] == ["10.77.0.1", "10.77.0.4", "10.77.1.1"]
    described = json.loads(json.dumps(lab.describe()))
    assert described.items() >= {"nodes": 2, "ranks_per_node": 4, "nic": "rank", "rate_bits_per_second": 10**8}.items()
    assert described["burst_bytes"] == 16384 and described["mtu"] == 9000
    assert Loopback(4).describe().keys() == described.keys()
    assert interface_bytes() == {}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("up --nodes 0 --ranks-per-node 2", "--nodes 0: give 1 or more"),
        ("up --nodes 2 --ranks-per-node -1", "--ranks-per-node -1: give 1 or more"),
        ("up --nodes 20 --ranks-per-node 20", "--nodes 20 --ranks-per-node 20: 400 ranks; give at most 256"),
        ("up --nodes 2 --ranks-per-node 2 --node-rate 100", "--node-rate 100: give a number above 0 and a unit"),
        ("up --nodes 2 --ranks-per-node 2 --node-rate 0mbit", "--node-rate 0mbit: give a number above 0 and a unit"),
        ("up --nodes 2 --ranks-per-node 2 --name a/b", "--name a/b: give up to 40 letters"),
        ("run --ranks 0 -- x.py", "--ranks 0: give 1 to 256"),
        ("run --ranks 2 -- none.py", "CMD none.py: no such file; give a Python script"),
        ("run --name none -- x.py", "--name none: no such lab is up"),
    ],
)
def test_wrong_arguments(argv, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        main(argv.split())


def test_without_root_or_iproute2(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match=r"^up needs root: put sudo before it"):
        Lab(1, 1, name=NAME).up()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"^up needs the program ip: apt install iproute2"):
        Lab(1, 1, name=NAME).up()


def test_errors_are_one_line():
    done = subprocess.run([*TOOL, "run", "--ranks", "0", "x.py"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "netlab: error: --ranks 0: give 1 to 256\n")
