"""A process of vllm_first_token.py: the last one is vLLM and its client, the others are the ranks of the server."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
PORT = 5000


def address() -> str:
    """This node's address in the lab."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return probe.getsockname()[0]


def serve(job: dict) -> None:
    """A rank of the prefill server, until the decoder is done."""
    os.environ["WORLD_SIZE"] = str(job["ranks"])
    from megatron.context_parallel.commands.run_text_generation_server import main

    main(
        [
            *("--load", job["model"], "--host", os.environ["MASTER_ADDR"], "--port", str(PORT)),
            *("--handoff-host", address(), "--cache-tokens", str(3 * job["tokens"]), "--allowed-hosts", "*"),
        ]
    )


def decode(job: dict, job_file: str) -> None:
    """vLLM in its environment; it ends the ranks when it is done."""
    until = time.monotonic() + 300
    url = f"http://{os.environ['MASTER_ADDR']}:{PORT}"
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5)
            break
        except OSError:
            time.sleep(1)
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    settings |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT), "PREFILL": url}
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    subprocess.run(
        [job["vllm"], "-m", "benchmarks.vllm_first_token_decoder", job_file], env=kept | settings, check=True
    )


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if int(os.environ["RANK"]) < job["ranks"]:
        serve(job)
        return
    try:
        decode(job, sys.argv[1])
    finally:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        launcher = os.getppid()
        for pid in pids:
            if pid != os.getpid() and _parent(pid) == launcher:
                os.kill(pid, signal.SIGTERM)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


if __name__ == "__main__":
    main()
