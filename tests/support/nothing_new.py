"""What a CUDA graph does not capture is refused on any device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NothingNew(TorchDispatchMode):
    """Refuses new tensors, and reading a tensor on the host. Only the operations `but` may return new tensors."""

    def __init__(self, *but: object) -> None:
        super().__init__()
        self.but = but

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert func._schema.name not in ("aten::item", "aten::_local_scalar_dense"), func
        given = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        new = any(x.untyped_storage().data_ptr() not in given for x in _tensors(result))
        assert not new or func.overloadpacket in self.but, f"{func} makes a new tensor"
        return result


def _tensors(tree: object) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
