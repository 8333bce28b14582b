"""The cluster of the Slurm tests, and data on it."""

import json
import subprocess
import sys

import pytest

from tests.campaigns.slurm.cluster import ROOT, Slurm, missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def corpus(slurm) -> str:
    """The prefix of a small corpus."""
    text = slurm.directory / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"document {n} says {n * n}"}) + "\n" for n in range(2000)))
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(text), "--append-eod"]
    subprocess.run([*command, "--output-prefix", str(slurm.directory / "corpus")], cwd=ROOT, check=True)
    return str(slurm.directory / "corpus_text_document")
