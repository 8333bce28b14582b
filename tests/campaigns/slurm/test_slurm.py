"""`examples/slurm/pretrain.sbatch` under a real Slurm: `bash tests/campaigns/slurm/run.sh`."""

import re

import pytest

from tests.campaigns.slurm.cluster import ROOT, Job

ENDLESS = 100_000  # iterations: the tests end these jobs


@pytest.fixture
def flags(slurm, corpus):
    """The flags of a run whose checkpoints are in folder `name` of the cluster; the launch scripts give the same."""

    def of(name: str) -> list[str]:
        save = str(slurm.directory / name)
        shape = "--preset tiny-llama --cp-strategy ring --context-parallel-size 2 --global-batch-size 4"
        launch = "--bf16 --use-distributed-optimizer --micro-batch-size 1 --lr-decay-style cosine"
        launch += " --lr-warmup-fraction 0.01 --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0"
        run = f"--lr 3e-4 --min-lr 3e-5 --train-iters {ENDLESS} --eval-iters 0 --num-workers 0 --log-interval 1"
        return [*f"{shape} {launch} {run} --data-path {corpus}".split(), "--save", save, "--load", save]

    return of


def test_a_job_outlives_its_time_limit_and_a_dead_node(slurm, flags):
    job = Job(slurm, "job").submit(*flags("job"))
    job.wait(lambda: len(job.losses()) > 5)
    job.update("TimeLimit=5")  # within the 300 seconds of the script's --signal: Slurm sends it now
    job.wait_for("PENDING")
    in_time = job.saved()
    assert in_time == max(job.losses()) > 5

    job.update("TimeLimit=60")
    job.go_on()
    job.wait(lambda: max(job.losses()) > in_time + 5)
    assert f"resuming after iteration {in_time}\n" in job.text()
    slurm.fail("n2")
    job.wait_for("PENDING")
    assert (job.saved(), job.show("Restarts")) == (in_time, "2")

    job.go_on()
    job.wait(lambda: job.show("NodeList") == "n[1,3]")
    job.wait(lambda: job.text().count(f"resuming after iteration {in_time}\n") == 2)
    job.wait(lambda: max(job.losses()) > in_time + 10)
    job.cancel()
    assert job.show("JobState") == "CANCELLED"
    last = job.saved()
    assert last == max(job.losses()) > in_time + 10

    # The same without any interruption, from the launch script of the family.
    whole = Job(slurm, "whole")
    script = ["bash", "examples/llama/pretrain.sh", "tiny-llama", "ring", *flags("whole"), "--exit-interval", str(last)]
    launch = " ".join(["sbatch", *whole.options(), f"{ROOT}/examples/slurm/pretrain.sbatch"])
    whole.took(slurm.run(*script, LAUNCH=launch, RANKS_PER_NODE="2"))
    whole.wait_for("COMPLETED")
    assert whole.losses() == job.losses()
    assert sorted(whole.losses()) == list(range(1, last + 1))


def test_without_progress_a_job_is_not_requeued(slurm, flags):
    job = Job(slurm, "short").submit(*flags("short"))
    job.wait_for_launchers()
    slurm.run("scancel", "--batch", "--signal=USR1", job.number)  # as Slurm does at once if --time is below the lead
    job.wait_for("FAILED")
    assert "is not requeued: it saved nothing" in job.text()
    assert job.show("Restarts") == "0"


def test_a_job_preempted_while_it_starts_is_requeued(slurm, flags):
    job = Job(slurm, "preempted").submit(*flags("preempted"))
    job.wait_for_launchers()
    slurm.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    job.wait_for("PENDING")
    assert job.show("Restarts") == "1"
    job.cancel()


@pytest.mark.parametrize(
    ("given", "environment", "says"),
    [
        (["--save", "a", "--load", "a"], {"RANKS_PER_NODE": ""}, "the job has no GPUs: submit with --gpus-per-node=8"),
        (["--save", "a"], {}, "--load (missing): give --save and --load the same folder, such as a,"),
        (["--save", "a", "--load", "a"], {"GLOO_SOCKET_IFNAME": "ib9"}, "ib9: no such interface"),
    ],
)
def test_what_cannot_run_ends_with_one_line(slurm, request, given, environment, says):
    job = Job(slurm, request.node.callspec.id).submit(*given, **environment)
    job.wait_for("FAILED")
    assert job.text().startswith("pretrain.sbatch: ") and says in job.text()
    assert job.text().count("\n") == 1


def test_a_dry_run_needs_one_process(slurm, flags):
    job = Job(slurm, "dry").submit(*flags("dry"), "--dry-run")
    job.wait_for("COMPLETED")
    assert job.text().count("4 ranks, order tp-cp") == 1


def test_ranks_use_the_interface_that_is_named(slurm, flags):
    job = Job(slurm, "fast").submit(*flags("fast")[:-4], options="--no-requeue", GLOO_SOCKET_IFNAME="fast0")
    job.wait(lambda: "iteration " in job.text())
    (port,) = re.findall(r"first node \S+, port (\d+)", job.text())
    store = f"*:{port}"  # PyTorch's, on the first node: it can listen on all interfaces only
    first, second = slurm.run("scontrol", "show", "hostnames", job.show("NodeList")).split()
    for node, everywhere in ((first, {store}), (second, set())):
        address = f"10.78.0.{node[1:]}"
        sockets = slurm.on_node(node, "ss", "--tcp", "--all", "--numeric", "--no-header", "--processes").splitlines()
        ours = [line.split() for line in sockets if '"pt_' in line or '"python' in line]
        connected = {end.rpartition(":")[0] for state, _, _, end, *_ in ours if state == "ESTAB"}
        listening = {end for state, _, _, end, *_ in ours if state == "LISTEN"}
        assert {host.strip("[]").removeprefix("::ffff:") for host in connected} == {address}
        assert {end for end in listening if not end.startswith(f"{address}:")} == everywhere
    job.cancel()
