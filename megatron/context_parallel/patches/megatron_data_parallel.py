"""megatron-core's data parallelism: the base class of its wrappers, and its check before gradients are reduced.

The base class has no public name. The check cannot be configured, and ends the process of one rank.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.distributed.data_parallel_base import _BaseDataParallel

CHECKED = {"megatron-core": "0.16 to 0.19"}

BaseDataParallel = _BaseDataParallel  # schedules and the optimizer call its methods


def before_reduction(bucket_group: Any, look: Callable[..., None]) -> None:
    """Calls `look` before the gradients of a group of buckets are reduced, instead of megatron-core's check.

    Args:
        bucket_group: a bucket group of a `DistributedDataParallel`.
        look: called with `check_for_nan_or_inf` and `check_for_large`, both bool.
    """
    bucket_group.ddp_config.check_for_nan_in_grad = True
    bucket_group.check_grads = look
