"""The attention of one pass over the cache, which replaces the core attention of each layer."""

from dataclasses import dataclass

from torch import Tensor

from megatron.context_parallel.attention.api import attention_of_rows
from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.integration.spec import ContextParallelAttention
from megatron.context_parallel.kernels.choose import kernel_for

from .batch_layout import BatchLayout
from .cache import KVCache


@dataclass(frozen=True)
class CacheAttention:
    """Stores the keys and values of a pass, and attends over all cached ones.

    Attributes:
        batch: the rows of the pass, and the slots of the cached keys.
        cache: the cache of this rank.
        group: the context group; its strategy decides which tensors are sent.
    """

    batch: BatchLayout
    cache: KVCache
    group: ContextParallel

    def __call__(self, core: ContextParallelAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention of this rank's new rows over all cached rows, [s, 1, heads, d].

        A rank without new rows has a dummy row in the model, because layers need one. It is neither query nor key.
        """
        rows = self.batch.rows
        layer = core.layer_number - 1
        kernel = kernel_for(q.device, q.dtype, q.shape[-1], core.backend, value_dim=v.shape[-1])
        kernel = self.cache.kernel(kernel, q.shape[-1], v.shape[-1])
        blocks, slots = self.batch.view(core.window, kernel)
        self.cache.append(layer, self.batch.new_slots, k[:rows, 0], v[:rows, 0])
        keys, values = (x.unsqueeze(1) for x in self.cache.rows(layer, slots))
        inputs = [(q[:rows], keys, values)]
        (out,) = attention_of_rows(inputs, self.group, blocks, scale=core.scale, sinks=core.softmax_offset)
        return out if rows else q.new_zeros(1, *q.shape[1:3], v.shape[-1])

    @property
    def size(self) -> int:
        """The rows of the model, at least a dummy one."""
        return max(1, self.batch.rows)

    def write(self, core: ContextParallelAttention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """The same on [rows, heads, d], into `out`."""
        out.copy_(self(core, q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1))
