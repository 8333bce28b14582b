"""`bench`: the tiny runs that faults strike. This process forks their ranks, so it must have no threads."""

from pathlib import Path

import pytest

from .bench import Bench
from .job import warm


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    warm()
    return Bench(Path(tmp_path_factory.mktemp("faults")))
