"""megatron-core's data parallelism: the base of its wrappers, and what it calls before ranks add up gradients.

The base has no public name. The check that is called takes no function of ours, and ends the process of one rank.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.distributed.data_parallel_base import _BaseDataParallel

CHECKED = {"megatron-core": "0.16 to 0.19"}

BaseDataParallel = _BaseDataParallel  # schedules and the optimizer call its methods


def before_reduction(bucket_group: Any, look: Callable[..., None]) -> None:
    """Calls `look` before the ranks add up the gradients of a group of buckets, instead of megatron-core's check.

    Args:
        bucket_group: of a `DistributedDataParallel`.
        look: takes `check_for_nan_or_inf` and `check_for_large`, both bool.
    """
    bucket_group.ddp_config.check_for_nan_in_grad = True
    bucket_group.check_grads = look
