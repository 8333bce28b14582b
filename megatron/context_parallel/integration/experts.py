"""The router of megatron-core's experts, with losses that do not depend on the context ranks, and biased experts."""

from typing import Any

import torch.distributed as dist
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron.context_parallel.patches.megatron_experts import WEIGHED_BY_OWN_TOKENS, say_there_is_no_gemm

say_there_is_no_gemm()


class Router(TopKRouter):
    """Chooses the experts of each token.

    If losses are sums over tokens (`calculate_per_token_loss`), megatron-core 0.16 to 0.18 weights a rank's part of the
    load balancing loss by the rank's own tokens. With n context ranks that is 1/n of the loss of one rank.
    """

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: dist.ProcessGroup,
        *others: Any,
        **named: Any,
    ) -> Tensor:
        """As in megatron-core; `aux_loss` [] is this rank's part of the loss of the micro batch."""
        n = reduce_group.size() if self.calculate_per_token_loss and WEIGHED_BY_OWN_TOKENS else 1
        given = activation, aux_loss_coeff * n, aux_loss * n, aux_loss_name, reduce_group  # the log divides them
        return super().attach_and_log_load_balancing_loss(*given, *others, **named)


class ExpertProjection(RowParallelLinear):
    """The last projection of an expert with biases.

    megatron-core adds the weighted bias to the output in place, which autograd forbids for what its reduction returns.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output [tokens, hidden] and the bias [hidden]."""
        out, bias = super().forward(x)
        return out.clone(), bias
