"""Groups that are taken for those of NCCL."""

from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def as_nccl():
    """The backend of all groups is taken for NCCL."""
    with (
        patch("torch.distributed.get_backend_config", return_value="cuda:nccl"),
        patch("torch.cuda.current_device", return_value=0),
        patch("torch.distributed.barrier"),
    ):
        yield
