"""A small language model in plain PyTorch, trained with FSDP2 over data and context ranks."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron.context_parallel import ContextParallel, context_parallel_attention
from tests.support.device import DEVICE, head_dim, on_device

VOCABULARY, HEADS, LENGTH, BATCH = 32, 4, 32, 2
WIDTH = HEADS * head_dim(4)
ATTENTION = torch.ops.context_parallel.attention.default


def save_attention(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "non-reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, save_attention),
    },
}


class Block(nn.Module):
    def __init__(self, cp: ContextParallel, recompute: str = "") -> None:
        super().__init__()
        self.cp, self.recompute = cp, recompute
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._forward, x, **CHECKPOINTS[self.recompute]) if self.recompute else self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        """[b, s, WIDTH]."""
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1)).unbind(2)
        x = x + context_parallel_attention(q, k, v, self.cp, tensor_layout="bshd").flatten(2)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, cp: ContextParallel, recompute: str = "") -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(cp, recompute), Block(cp, recompute))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.places(places)))


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels int64 [BATCH, LENGTH], the labels shifted, -100 where there is none."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    labels = pad(tokens[:, 1:], (0, 1), value=-100)
    labels[0, 5:9] = -100
    return tokens, labels


def sharded(cp: ContextParallel, mesh: DeviceMesh, recompute: str = "", compiled: bool = False) -> Model:
    """The model with the same weights on all ranks, its blocks and itself sharded over all dimensions of `mesh`."""
    if compiled:
        torch.compiler.reset()  # else what earlier cases compiled counts against its limit
    torch.manual_seed(1)
    model = on_device(Model(cp, recompute))
    for block in model.blocks:
        if compiled:
            block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def steps(model: Model, cp: ContextParallel, data_rank: int, data_size: int, count: int = 5) -> list[float]:
    """Losses of some steps, the mean over all tokens with a label."""
    optimizer, (tokens, labels), losses = torch.optim.SGD(model.parameters(), lr=0.5), on_device(batch()), []
    mine = slice(data_rank * BATCH // data_size, (data_rank + 1) * BATCH // data_size)
    for _ in range(count):
        logits = model(cp.shard(tokens[mine], 1), on_device(cp.positions(LENGTH)))
        total = cross_entropy(logits.flatten(0, 1), cp.shard(labels[mine], 1).flatten(), reduction="sum")
        loss = total * dist.get_world_size() / (labels != -100).sum()  # FSDP averages gradients over all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / dist.get_world_size())
    return losses


def train(spec: str, data: int = 1, hybrid: bool = False, **how) -> list[float]:
    """Losses on all ranks, `data` of them along the batch; `hybrid`: weights are sharded over context ranks only."""
    mesh = init_device_mesh(DEVICE, (data, dist.get_world_size() // data), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(spec, group=mesh["cp"])
    whole = mesh if hybrid else mesh._flatten("all")
    return steps(sharded(cp, whole, **how), cp, mesh["dp"].get_local_rank(), data)


def save_and_load(folder: str) -> bool:
    """Whether a model saved from FSDP over 4 ranks has the same logits, bit for bit, in HSDP over 2 x 2."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel("ring", group=mesh["cp"])
    tokens, places = on_device((cp.shard(batch()[0], 1), cp.positions(LENGTH)))
    first = sharded(cp, mesh._flatten("all"))
    steps(first, cp, mesh["dp"].get_local_rank(), 2, count=1)
    dcp.save(get_model_state_dict(first), checkpoint_id=folder)
    second = sharded(cp, mesh)
    different = not torch.equal(first(tokens, places), second(tokens, places))
    state = get_model_state_dict(second)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(second, state)
    return different and torch.equal(first(tokens, places), second(tokens, places))
