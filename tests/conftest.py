"""Ranks for the tests, and what every test relies on."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests run on CPUs, also on a host with GPUs; set before torch is imported

import atexit
import gc

import pytest

gc.disable()  # until all tests are imported
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # the last of all: the interpreter would collect what is imported, for seconds

# Nothing heavy is imported here: the process that only hands out the tests reads this file too.
RANKS = pytest.StashKey()
SHORT = {"patches", "plan", "tokens"}  # folders whose files take seconds each


@pytest.fixture(autouse=True)
def _one_rank():
    """A test that leaves WORLD_SIZE behind fails, not the next one that trains in this process."""
    before = os.environ.get("WORLD_SIZE")
    yield
    assert os.environ.get("WORLD_SIZE") == before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files of the trainer come first, folders of short ones last: no process ends long after others."""
    items.sort(key=lambda item: str(item.path.parent), reverse=True)
    items.sort(key=lambda item: item.path.parent.name in SHORT)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Imported modules stay alive, so garbage collections skip them. Ranks begin with them, before any test runs."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    if any("ranks" in item.fixturenames for item in session.items) and not session.config.option.collectonly:
        from tests.support.gloo import share_a_thread
        from tests.support.ranks import Ranks

        share_a_thread()
        session.config.stash[RANKS] = Ranks()


@pytest.fixture(scope="session")
def ranks(request):
    return request.config.stash[RANKS]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if RANKS in session.config.stash:
        session.config.stash[RANKS].close()
    gc.unfreeze()  # where the interpreter ends as usual, some libraries complain at the end of what is left
