"""Softmax sinks: an additional score per head that gets weight but has no value (GPT-OSS; "off by one").

A sink is merged at the end, like another partial output that is 0 and has the sink as its log-sum-exp. So strategies,
plans and kernels do not depend on it.
"""

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scales `out` in place and returns the log-sum-exp with the sinks.

    Args:
        out: [s, b, heads, dv], float32 or wider; lse: [s, b, heads]; sinks: [heads].
    """
    sinks = sinks.to(lse.dtype)
    out.mul_(torch.sigmoid(lse - sinks).nan_to_num_(0.0).unsqueeze(-1))
    return torch.logaddexp(lse, sinks)


def sink_gradients(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """Gradients [heads] of the sinks from some tokens, in the dtype of `lse`.

    Args:
        lse: [s, b, heads], with the sinks; delta: [s, b, heads], rowsum(dout * out).
    """
    weight = (sinks.to(lse.dtype) - lse).exp().nan_to_num_(0.0)
    return -(weight * delta).sum((0, 1))
