"""A node of vllm_first_token.py: the last one has vLLM and its client, each other one a rank of the server."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
PORT = 5000
CHUNK = 2048  # prompt tokens of a step; short chunks of a long prompt exchange the cached keys often
SECONDS = 300  # for the server to start
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
VLLM["VLLM_CPU_OMP_THREADS_BIND"] = "0"  # one thread, as each rank has
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def address() -> str:
    """This node's address in the lab."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return probe.getsockname()[0]


def serve(job: dict) -> None:
    """A rank of the server, until there are results."""
    words = [sys.executable, str(ROOT / "tools/run_text_generation_server.py"), "--load", job["model"]]
    words += ["--host", os.environ["MASTER_ADDR"], "--port", str(PORT), "--handoff-host", address()]
    words += ["--cache-tokens", str(3 * job["tokens"][-1]), "--inference-dynamic-batching-max-tokens", str(CHUNK)]
    server = subprocess.Popen(words, env={**os.environ, "WORLD_SIZE": str(job["ranks"]), "PYTHONPATH": str(ROOT)})
    while not Path(job["results"]).exists():
        if server.poll() is not None:
            raise SystemExit(f"a rank of the server has ended with status {server.returncode}")
        time.sleep(0.5)
    server.terminate()
    server.wait()


def decode(job: dict, job_file: str) -> None:
    """vLLM in its environment."""
    server = f"{os.environ['MASTER_ADDR']}:{PORT}"
    end = time.monotonic() + SECONDS
    while not ready(server):
        if time.monotonic() > end:
            raise SystemExit("the server was not ready in time")
        time.sleep(1)
    kept = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    settings = {**VLLM, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "PREFILL": server}
    words = [job["vllm"], "-m", "benchmarks.vllm_first_token_decoder", job_file]
    subprocess.run(words, env=kept | settings, check=True)


def ready(server: str) -> bool:
    """Whether the server takes requests."""
    try:
        with urllib.request.urlopen(f"http://{server}/ready", timeout=5):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    of = json.loads(Path(sys.argv[1]).read_text())
    if int(os.environ["RANK"]) < of["ranks"]:
        serve(of)
    else:
        decode(of, sys.argv[1])
