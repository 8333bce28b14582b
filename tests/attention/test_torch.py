"""PyTorch around attention: torch.compile, selective checkpoints, autocast, orders of dimensions, DTensors, meshes."""

import pickle
import re
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import library
from torch._dynamo.exc import Unsupported
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron.context_parallel import AllRanks, ContextParallel, UsageError, context_parallel_attention
from megatron.context_parallel.kernels.reference import Reference
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.handles import object_of
from megatron.context_parallel.tokens.placement import Placement
from tests.support import torch_case
from tests.support.fsdp_case import fsdp_losses, one_rank  # noqa: F401  # a fixture

PAGE = Path(__file__).parents[2] / "docs" / "torch.md"
ATTENTION = torch.ops.context_parallel.attention.default
SPECS = ["ring", "usp:head_parallel_size=2", "usp:head_parallel_size=2,head_rounds=2"]


def tensors(*shape: int, count: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape, requires_grad=True) for _ in range(count)]


# -- compiled -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_compiled_without_a_graph_break(spec):
    """Also with fewer key/value heads than parts of the heads, sinks, strided inputs and documents that change."""
    cp, (q, k) = AllRanks(4, spec), tensors(16, 2, 4, 6, count=2)
    sinks = torch.randn(4, requires_grad=True)

    def layer(q, k, sinks, documents):
        q = (q * 2).transpose(0, 1).contiguous().transpose(0, 1)
        out, lse = context_parallel_attention(q, k[:, :, :1], k[:, :, 1:2, :4], cp, sinks=sinks, **documents)
        assert not lse.requires_grad
        return out + 1

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for bounds in ([0, 4, 16, 32], [0, 9, 16, 20, 32], [0, 16, 32]):
        how = {"return_lse": True, "documents": Documents.packed(torch.tensor(bounds), 16, samples=2)}
        got, expected = (of(q, k, sinks, how) for of in (compiled, layer))
        assert torch.equal(got, expected)
        grads = [torch.autograd.grad(x.square().sum(), (q, k, sinks)) for x in (got, expected)]
        assert all(map(torch.equal, *grads))


def test_compiled_mistakes_are_told():
    cp, (q, _, _) = AllRanks(2), tensors(6, 1, 2, 4)

    def compiled(**how):
        attend = partial(context_parallel_attention, q, q, q, cp, **how)
        torch.compile(lambda: attend(), backend="aot_eager", fullgraph=True)()

    with pytest.raises(UsageError, match="--seq-length 6: the zigzag layout over 2 ranks needs a multiple of 4"):
        compiled()
    with pytest.raises(Unsupported, match=r"torch.compile: `kernel` and `kept` are not supported; leave them out"):
        compiled(kernel=Reference())


@pytest.mark.parametrize("spec", SPECS)
def test_the_operator_is_what_pytorch_expects(spec):
    """Its schema, its shapes without data, its gradients, and all of it under symbolic shapes."""
    cp, (q, k, sinks) = AllRanks(4, spec), (*tensors(16, 1, 4, 4, count=2), torch.zeros(4, requires_grad=True))
    args = (q, k[:, :, :2], k[:, :, 2:], sinks, 0, cp.handle, True, [-1, -1], 0, 0.5, 0.0, 0)
    assert set(library.opcheck(ATTENTION, args).values()) == {"SUCCESS"}


def test_no_cuda_graph_of_pytorch_has_the_operators():
    """Its replay would skip what the host decides in a call, such as the documents of a batch."""
    for operator in (ATTENTION, torch.ops.context_parallel.attention_backward.default):
        assert torch.Tag.cudagraph_unsafe in operator.tags


def test_a_cuda_graph_with_documents_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x, cp = torch.randn(8, 1, 2, 4), AllRanks(2)
    assert context_parallel_attention(x, x, x, cp).shape == x.shape
    with pytest.raises(
        UsageError, match=r"documents: a CUDA graph would keep those .*; leave attention out of the graph"
    ):
        context_parallel_attention(x, x, x, cp, documents=Documents(torch.arange(8) // 3))


@pytest.mark.parametrize("spec", SPECS)
def test_kernels_run_where_their_tensors_are(spec, monkeypatch):
    """Triton launches on the current device. In a process with several GPUs it may be another one."""
    now: list[torch.Tensor] = []
    found = []

    @contextmanager
    def device_of(x):
        now.append(x)
        yield
        now.pop()

    class Watched(Reference):
        def forward(self, *args):
            found.append(len(now))
            return super().forward(*args)

        def backward(self, *args):
            found.append(len(now))
            return super().backward(*args)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    q, k, v = tensors(16, 1, 4, 4)
    out = context_parallel_attention(q, k, v, AllRanks(4, spec), kernel=Watched())
    torch.autograd.grad(out.sum(), (q, k, v))
    assert set(found) == {1} and len(found) > 8


def policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("spec", SPECS)
def test_a_selective_checkpoint_computes_no_block_again(spec, monkeypatch):
    cp, (x, weights), passes = AllRanks(4, spec), tensors(16, 1, 4, 4, count=2), []
    run = cp.run
    monkeypatch.setattr(cp, "run", lambda program, *args: passes.append(program.__name__) or run(program, *args))

    def layer(x):
        h = x * weights
        return context_parallel_attention(h, h, h, cp) * 2

    save = partial(create_selective_checkpoint_contexts, policy)
    saving = partial(checkpoint, layer, use_reentrant=False, context_fn=save)
    compiled = torch.compile(lambda x: saving(x), backend="aot_eager", fullgraph=True)
    twice = ["forward", "forward", "backward"]
    (grad,) = torch.autograd.grad(layer(x).square().sum(), weights)
    for function, expected in (
        (layer, ["forward", "backward"]),
        (saving, ["forward", "backward"]),
        (compiled, ["forward", "backward"]),
        (partial(checkpoint, layer, use_reentrant=False), twice),
        (partial(checkpoint, layer, use_reentrant=True), twice),
    ):
        passes.clear()
        weights.grad = None
        function(x).square().sum().backward()
        assert passes == expected
        assert torch.equal(weights.grad, grad)


def test_objects_of_the_operator():
    """A copy of documents is another object. Deleted documents raise an error and are never confused with others."""
    documents = Documents(torch.tensor([0, 0, 1, 1]))
    copied = pickle.loads(pickle.dumps(documents))
    assert copied.shape == documents.shape and copied.handle != documents.handle
    assert object_of(copied.handle, "documents") is copied
    handle = copied.handle
    del copied
    with pytest.raises(UsageError, match="documents: it was freed before its last use"):
        object_of(handle, "documents")


# -- inputs ---------------------------------------------------------------------------------------------


def test_orders_of_dimensions():
    cp, (q, k, v) = AllRanks(4), tensors(16, 2, 4, 6)
    k, v = k[:, :, :2], v[:, :, :2, :3]
    expected = context_parallel_attention(q, k, v, cp, return_lse=True)
    grads = torch.autograd.grad(expected[0].square().sum(), (q, k, v))
    for layout, order in (("bshd", (1, 0, 2, 3)), ("bhsd", (1, 2, 0, 3))):
        leaves = [x.detach().permute(order).requires_grad_() for x in (q, k, v)]
        out, lse = context_parallel_attention(*leaves, cp, tensor_layout=layout, return_lse=True)
        assert torch.equal(out, expected[0].permute(order)) and torch.equal(lse, expected[1].permute(order[:3]))
        for got, grad in zip(torch.autograd.grad(out.square().sum(), leaves), grads, strict=True):
            assert torch.equal(got, grad.permute(order))


def test_wrong_orders_are_told():
    q = torch.zeros(2, 2, 8, 4)
    for how, message in (
        ({"tensor_layout": "thd"}, "tensor_layout 'thd': unknown; give one of sbhd, bshd, bhsd"),
        ({"tensor_layout": "bhsd", "k": q[:, :, :, :3]}, r"need q \[b, heads, s, d\], k \[b, kv_heads, t, d\] and v"),
        ({"tensor_layout": "bshd", "k": q[:, :, :5], "v": q[:, :, :5]}, "5 key/value heads do not divide 8 query"),
    ):
        with pytest.raises(UsageError, match=message):
            context_parallel_attention(q, cp=AllRanks(2), **{"k": q, "v": q, **how})


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_autocast(softcap):
    """Inputs are cast as for PyTorch's own attention; inside, blocks keep the dtypes that the kernel chooses."""
    cp, (q, k, v) = AllRanks(2), tensors(16, 1, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        plain = scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)))
        out = context_parallel_attention(q, k.bfloat16(), v, cp, softcap=softcap)
        (grad,) = torch.autograd.grad(out.float().square().sum(), q)
    assert out.dtype == plain.dtype == torch.bfloat16 and grad.dtype == torch.float32
    halves = [x.bfloat16() for x in (q, k, v)]
    expected = context_parallel_attention(*halves, cp, softcap=softcap)
    assert torch.equal(out, expected)
    assert torch.equal(grad, torch.autograd.grad(expected.float().square().sum(), q)[0])
    wide = [x.double() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        assert context_parallel_attention(*wide, cp).dtype == torch.float64


# -- meshes and DTensors --------------------------------------------------------------------------------------


def _on_a_mesh() -> tuple[list, list[str]]:
    """Heads sharded over 2 ranks and the sequence over 2: out and gradients as whole tensors; what is refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    cp = ContextParallel("ring", "contiguous", mesh["cp"])
    whole = tensors(2, 8, 4, 6)
    q, k, v = (distribute_tensor(x.detach(), mesh, (Shard(2), Shard(1))).requires_grad_() for x in whole)
    out, lse = context_parallel_attention(q, k, v, cp, tensor_layout="bshd", return_lse=True)
    out.square().sum().backward()
    results = [x.full_tensor() for x in (out.detach(), lse, q.grad, k.grad, v.grad)]

    def placed(*placements, like=q) -> DTensor:
        return DTensor.from_local(like.to_local().detach(), mesh, placements, run_check=False)

    zigzag, odd, partial_ = ContextParallel(group=mesh["cp"]), placed(Shard(2), Shard(3)), placed(Partial(), Shard(1))
    attend = partial(context_parallel_attention, tensor_layout="bshd")
    documents = Documents(torch.zeros(8, dtype=torch.int64)).placed(Placement([[(0, 4)], [(4, 8)]]))
    said = []
    for wrong in (
        lambda: attend(q, k.to_local(), v, cp),
        lambda: attend(q, placed(Shard(1), Shard(2)), v, cp),
        lambda: attend(*[placed(Shard(1), Replicate())] * 3, cp),
        lambda: attend(*[placed(Shard(1), Shard(1))] * 3, cp),
        lambda: attend(*[odd] * 3, cp),
        lambda: attend(*[partial_] * 3, cp),
        lambda: attend(*[placed(_StridedShard(1, split_factor=2), Shard(1))] * 3, cp),
        lambda: attend(q, k, v, AllRanks(2)),
        lambda: attend(q, k, v, zigzag),
        lambda: attend(q, k, v, cp, documents=documents),
        lambda: attend(*[distribute_tensor(x.detach()[:, :7], mesh, (Shard(2), Shard(1))) for x in whole], cp),
        lambda: attend(q, k, v, cp, sinks=distribute_tensor(torch.zeros(4), mesh, (Shard(0), Replicate()))),
        lambda: ContextParallel(group=mesh),
        lambda: ContextParallel(group=[0, 1]),
        lambda: ContextParallel("ring", mesh["cp"]),
        lambda: attend(q, k, v, mesh["cp"]),
    ):
        with pytest.raises(UsageError) as caught:
            wrong()
        said.append(str(caught.value))
    return results, said


def test_dtensors_and_a_mesh(ranks):
    q, k, v = tensors(2, 8, 4, 6)
    out, lse = context_parallel_attention(q, k, v, AllRanks(1), tensor_layout="bshd", return_lse=True)
    expected = [out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v))]
    for results, said in ranks(4, _on_a_mesh):
        torch.testing.assert_close(results, [x.detach() for x in expected])
        for line, start in zip(
            said,
            (
                "q, k, v: some are DTensors and some are not; give all of one kind",
                "q, k, v placed (Shard(dim=2), Shard(dim=1)), (Shard(dim=1), Shard(dim=2))",
                *["q, k, v are DTensors placed"] * 6,
                "--cp-layout zigzag: DTensors have contiguous shards; give contiguous",
                "documents with a placement: DTensors have contiguous shards; give documents without one, or q.to",
                "q [2, 7, 4, 6]: a DTensor whose dimension 1 has unequal shards on 2 ranks; give a multiple",
                "sinks: a DTensor; give the whole tensor, such as sinks.full_tensor()",
                "group: a DeviceMesh of 2 dimensions, ('tp', 'cp'); give one of them, such as mesh[\"cp\"]",
                "group: of type list; give a process group, such as dist.new_group([0, 1]), or a one-dimensional",
                "layout: of type DeviceMesh; give its name, and the group as group=...",
                "cp: of type DeviceMesh; give a ContextParallel(strategy, group=...), not a mask tensor",
            ),
            strict=True,
        ):
            assert line.startswith(start) and "\n" not in line


def _of_head_groups() -> tuple[torch.Tensor, str]:
    """The output of DTensors over head groups of neighbours, and what is said if ranks far apart share tokens."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    q, k, v = (distribute_tensor(x.detach(), mesh, (Shard(1),)) for x in tensors(2, 8, 4, 6))
    attend = partial(context_parallel_attention, q, k, v, tensor_layout="bshd")
    out = attend(ContextParallel("usp", "contiguous", mesh, head_parallel_size=2))
    with pytest.raises(UsageError) as caught:
        attend(ContextParallel("usp", "contiguous", mesh, head_parallel_size=2, placement="context-first"))
    return out.full_tensor(), str(caught.value)


def test_dtensors_of_head_groups(ranks):
    expected = context_parallel_attention(*tensors(2, 8, 4, 6), AllRanks(1), tensor_layout="bshd").detach()
    for out, said in ranks(4, _of_head_groups):
        torch.testing.assert_close(out, expected)
        assert said.startswith("--cp-placement context-first: DTensors have their shards in the order of the ranks;")


# -- FSDP2 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "how"),
    [
        ("ring", {"data": 2}),
        ("mesh", {"recompute": "reentrant"}),
        ("lightseq", {"data": 2, "hybrid": True, "recompute": "selective"}),
        ("ulysses", {"compiled": True}),
    ],
)
def test_training_with_fsdp_equals_one_rank(ranks, one_rank, spec, how):  # noqa: F811  # the fixture
    for losses in fsdp_losses(ranks, spec, how):
        assert losses == pytest.approx(one_rank, abs=1e-6)


def test_a_checkpoint_of_fsdp_loads_in_hsdp(ranks, tmp_path):
    assert all(ranks(4, torch_case.save_and_load, str(tmp_path)))


def example() -> None:
    source = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    exec(compile(source, str(PAGE), "exec"), {"__name__": "example"})


def test_the_example_of_the_page_runs(ranks):
    ranks(4, example)
