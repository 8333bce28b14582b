"""`examples/slurm/serve.sbatch` under a real Slurm: `bash tests/campaigns/slurm/run.sh`."""

import json
import subprocess
import sys

import pytest

from tests.campaigns.slurm.cluster import ROOT, Job

ASK = {"model": "byte-model", "prompt": "docu", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def trained(slurm, corpus) -> str:
    """A directory with the checkpoint of a short run."""
    save = slurm.directory / "byte-model"
    flags = "--preset tiny-llama --train-iters 2 --lr 1e-3 --global-batch-size 1 --micro-batch-size 1 --eval-iters 0"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", "29561"]
    command = [*launch, "pretrain_gpt.py", *flags.split(), "--data-path", corpus, "--save", str(save)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return str(save)


def test_a_server_over_two_nodes_answers_and_ends(slurm, trained):
    job = Job(slurm, "serve")
    flags = ["--load", trained, "--host", "0.0.0.0", "--port", "5000", "--cache-tokens", "512"]
    script = [str(ROOT / "examples/slurm/serve.sbatch"), *flags]
    job.took(slurm.run("sbatch", *job.options(), *script, RANKS_PER_NODE="2", GLOO_SOCKET_IFNAME="fast0"))
    job.wait(lambda: "listening at" in job.text())
    assert "ranks meet at 10.78.0." in job.text()
    first = slurm.run("scontrol", "show", "hostnames", job.show("NodeList")).split()[0]
    url = f"http://{first}:5000"
    post = ["-H", "Content-Type: application/json", "-d", json.dumps(ASK)]
    answer = json.loads(slurm.run("curl", "--silent", "--show-error", f"{url}/v1/completions", *post))
    assert answer["usage"]["completion_tokens"] == 4 and answer["choices"][0]["finish_reason"] == "length"
    assert json.loads(slurm.run("curl", "--silent", f"{url}/ready")) == {"status": "ready"}
    long = ["-H", "Content-Type: application/json", "-d", json.dumps(ASK | {"max_tokens": 60, "stream": True})]
    stream = subprocess.Popen(
        [*slurm.enter, "curl", "--silent", "--no-buffer", f"{url}/v1/completions", *long],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert stream.stdout.readline().startswith("data: ")
    slurm.run("scancel", job.number)
    assert stream.stdout.read().endswith("data: [DONE]\n\n")  # what has begun is finished
    stream.wait(30)
    job.wait(lambda: not job.queued())
    assert job.show("JobState") == "CANCELLED"
    assert job.text().count("Traceback") == job.text().count("SignalException: Process ")  # torchrun's own
    lines = [json.loads(line) for line in job.text().splitlines() if line.startswith("{")]
    assert [line["complete"] for line in lines if line["path"] == "/v1/completions"] == [True, True]
