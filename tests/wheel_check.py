"""Each rank of tests/wheel.sh: every strategy is exact, in an environment with only torch, numpy and this package."""

from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

import megatron.context_parallel as package
from megatron.context_parallel import STRATEGIES, AllRanks, ContextParallel, context_parallel_attention
from megatron.context_parallel.kernels.reference import attention

LENGTH, HEADS, DIM = 64, 4, 8


def gradients(attend, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Output, dq, dk, dv for q, k, v and an output gradient [s, 1, heads, d]."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def check(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for x, exact in zip(got, expected, strict=True):
        assert (x - exact).norm() / exact.norm() < 1e-5


def main() -> None:
    for other in ("megatron.core", "rich", "matplotlib", "yaml", "tensorboard", "psutil", "xxhash"):
        assert find_spec(other) is None, f"{other} is installed"
    installed = Path(package.__file__).parent
    assert "site-packages" in installed.parts and (installed / "py.typed").exists()
    assert (installed / "trainer/config/presets/tiny-llama.yaml").exists()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole = [torch.randn(LENGTH, 1, HEADS, DIM) for _ in range(4)]
    exact = gradients(lambda *x: attention(*x, causal=True, scale=DIM**-0.5)[0].float(), *whole)
    for name in STRATEGIES:
        options = {"head_parallel_size": 2} if name in ("usp", "loongtrain") else {}  # with 1 they are ring
        here = AllRanks(dist.get_world_size(), name, **options)
        check(gradients(lambda *x, cp=here: context_parallel_attention(*x, cp), *whole), exact)
        cp = ContextParallel(name, **options)
        got = gradients(lambda *x, cp=cp: context_parallel_attention(*x, cp), *map(cp.shard, whole))
        check(got, [cp.shard(x) for x in exact])
    if dist.get_rank() == 0:
        print(f"exact: {', '.join(STRATEGIES)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
