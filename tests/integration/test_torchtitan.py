"""torchtitan with our attention: a stand-in for torchtitan, and its own trainer if TORCHTITAN_PATH=FOLDER is set."""

import importlib.util
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from megatron.context_parallel import UsageError
from megatron.context_parallel.integration.batch import shard_batch
from megatron.context_parallel.tokens.layout import unshard
from megatron.context_parallel.tokens.place_documents import Costs, place
from tests.support import torchtitan_case
from tests.support import torchtitan_standin as standin

PAGE = Path(__file__).parents[2] / "docs" / "torchtitan.md"
LENGTH, BATCH = 32, 2


def dims(cp: int = 2, pp: int = 1) -> SimpleNamespace:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return SimpleNamespace(cp_enabled=cp > 1, pp_enabled=pp > 1, pp=pp, get_mesh=lambda name: mesh)


def parallelized(config, parallel_dims) -> torch.nn.Module:
    spec = config.model_spec
    settings = {"parallel_dims": parallel_dims, "training": config.training, "parallelism": config.parallelism}
    return spec.parallelize_fn(spec.model.build(), **settings, compile_config=None)


def positions() -> torch.Tensor:
    """Three documents in the first sample and two in the second, int64 [BATCH, LENGTH]."""
    samples = (5, 1, 26), (19, 13)
    return torch.stack([torch.cat([*map(torch.arange, lengths)]) for lengths in samples])


def parts(strategy: str, placed: bool) -> list[torch.Tensor]:
    """The whole inputs, labels, positions and output, put together from the parts of both ranks."""
    with standin.standing_in():
        from torchtitan import trainer
        from torchtitan.components import validate

        from megatron.context_parallel.integration.torchtitan import use_context_parallel

        config, parallel_dims = standin.debugmodel(), dims()
        decides = partial(place, costs=Costs(1.0)) if placed else None
        assert use_context_parallel(config, strategy, decides) is config
        attention = parallelized(config, parallel_dims).layers[1]
        sharding, saved = attention._sharding_config, trainer_saves()
        assert trainer.prepare_context_parallel_input is validate.prepare_context_parallel_input
        tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
        batch = tokens, tokens + 1, {"positions": positions()}, parallel_dims.get_mesh("cp"), tokens.device
        inputs, labels, kwargs = trainer.prepare_context_parallel_input(*batch, "headtail", None)
        documents = kwargs["attention_masks"]
        local = shard_batch(dict(zip("qkv", tensors(), strict=True)), attention.cp, documents)
        out = attention(*local.values(), attention_masks=documents, scale=0.3, enable_gqa=True)
        gathered = []
        for part in (inputs, labels, kwargs["positions"], out):
            every = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(2)]
            dist.all_gather(every, part.contiguous())
            if placed:
                assert part.shape[:2] == (1, BATCH * LENGTH // 2)
                whole = documents.placement.unshard([of_rank[0] for of_rank in every])
                gathered.append(whole.unflatten(0, (BATCH, LENGTH)))
            else:
                gathered.append(unshard(every, attention.cp.layout, dim=1))
    assert set(sharding.in_dst_shardings.values()) == {standin.SHARDED}
    assert sharding.local_map.in_grad_placements == (standin.SHARDED,) * 3
    assert saved == {torch.ops.aten.mm.default, torch.ops.context_parallel.attention.default}
    return gathered


def trainer_saves() -> set:
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    return SelectiveAC().get_save_ops()


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [torch.randn(BATCH, LENGTH, heads, 8) for heads in (4, 2, 2)]


@pytest.mark.parametrize(
    ("strategy", "placed"), [("ring", False), ("ulysses:layout=contiguous", False), ("direct", True)]
)
def test_attention_stays_within_documents(ranks, strategy, placed):
    of = (positions() == 0).cumsum(1)
    mask = (of[:, :, None] == of[:, None]).tril()[:, None]
    q, k, v = (x.transpose(1, 2) for x in tensors())
    expected = scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    for inputs, labels, places, out in ranks(2, parts, strategy, placed):
        assert torch.equal(inputs, tokens) and torch.equal(labels, tokens + 1) and torch.equal(places, positions())
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def mistakes() -> list[str]:
    """The error of each wrong use."""
    with standin.standing_in():
        import torchtitan
        from torchtitan import trainer

        from megatron.context_parallel.integration.torchtitan import use_context_parallel

        def made(strategy: str = "ring", model=standin.Decoder, parallel_dims=None, **changed):
            config = use_context_parallel(standin.debugmodel(model), strategy)
            for owner in (config.training, config.parallelism):
                vars(owner).update({name: value for name, value in changed.items() if name in vars(owner)})
            return parallelized(config, parallel_dims or here)

        def varlen() -> None:
            config = standin.debugmodel()
            config.model_spec.model.layers[1].attention.inner_attention = standin.VarlenAttention.Config()
            use_context_parallel(config, "ring")

        def old() -> None:
            torchtitan.__version__ = "0.2.2"
            try:
                use_context_parallel(standin.debugmodel(), "ring")
            finally:
                torchtitan.__version__ = "0.3.0"

        def cut(**given) -> None:
            tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
            trainer.prepare_context_parallel_input(tokens, tokens, given, here.get_mesh("cp"), tokens.device)

        here = dims()
        attention = made().layers[0]
        unmade = use_context_parallel(standin.debugmodel(), "ring").model_spec.model.build().layers[0]
        x, places = torch.zeros(1, LENGTH // 2, 2, 8), torch.zeros(1, LENGTH, dtype=torch.int64)
        alone = SimpleNamespace(get_group=lambda: None)
        calls = (
            old,
            varlen,
            lambda: made(model=standin.WindowedDecoder),
            lambda: use_context_parallel(SimpleNamespace(model_spec=SimpleNamespace(model=7)), "ring"),
            lambda: made("rings"),
            lambda: made(parallel_dims=dims(cp=1)),
            lambda: made(parallel_dims=dims(pp=2)),
            lambda: made(context_parallel_load_balancer=None),
            lambda: made(disable_cuda_graphs=False),
            lambda: made(seq_len=30),
            lambda: made("ulysses:layout=contiguous"),
            lambda: attention(x, x, x, score_mod=torch.add),
            lambda: unmade(x, x, x),
            lambda: cut(positions=places, attention_masks=places),
            cut,
            lambda: trainer.prepare_context_parallel_input(places, places, {"positions": places}, alone, x.device),
        )
        return [said_of(call) for call in calls]


def said_of(call) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    return str(caught.value)


def test_wrong_uses_are_told(ranks):
    for said in ranks(2, mistakes):
        for line, start in zip(
            said,
            (
                "torchtitan 0.2.2: not tested; install torchtitan==0.3.0",
                "Decoder: its attention is VarlenAttention; give model_registry(..., attn_backend='flex')",
                "WindowedDecoder: has its own attention masks; use a model with causal masks",
                "int: not a torchtitan decoder; use a language model",
                "--cp-strategy rings: ",
                "--parallelism.context_parallel_degree 1: 1 rank cannot share a sequence; give 2 or more",
                "--parallelism.pipeline_parallel_degree 2: not tested; give 1",
                "--parallelism.context_parallel_load_balancer None: the strategy decides which tokens a rank has",
                "CUDA graphs: not supported with context parallelism; give --training.disable_cuda_graphs",
                "--seq-length 30: the zigzag layout over 2 ranks needs a multiple of 4, such as 28",
                "--cp-strategy ulysses:layout=contiguous: these ranks already run a model with",
                "score_mod: not supported under context parallelism; use a model without it",
                "the model was not created by its parallelize_fn",
                "attention_masks in the batch: not supported",
                "positions: missing in the batch; use a data loader that gives them",
                "the model was not created for these ranks by use_context_parallel",
            ),
            strict=True,
        ):
            assert line.startswith(start) and "\n" not in line


def test_the_example_of_the_page_is_a_config():
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"__name__": "my_configs"}
    with standin.standing_in():
        exec(compile(source, str(PAGE), "exec"), names)
        config = names["llama3_8b_mesh"]()
    assert config.parallelism.context_parallel_degree == 8
    inner = config.model_spec.model.layers[0].attention.inner_attention
    assert inner._owner.__name__ == "ContextParallelAttention"


here = "TORCHTITAN_PATH" in os.environ or importlib.util.find_spec("torchtitan")


@pytest.mark.skipif(not here, reason="TORCHTITAN_PATH names no folder with torchtitan")
@pytest.mark.parametrize(
    ("strategy", "degree", "parallelism", "placed"),
    [
        ("ring", 4, {}, False),
        ("mesh", 2, {"data_parallel_shard_degree": 2}, False),
        ("lightseq", 4, {}, False),
        ("ulysses", 2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, False),
        ("ring", 2, {"tensor_parallel_degree": 2}, False),
        ("direct", 4, {}, True),
        ("usp:head_parallel_size=2", 4, {}, True),
    ],
)
def test_training_equals_one_rank(ranks, strategy, degree, parallelism, placed):
    (expected,) = ranks(1, torchtitan_case.train, None, 1)
    backend = {"spmd_backend": "partial_dtensor"}  # the one that torch 2.13 runs and that logs the right loss
    for steps in ranks(4, torchtitan_case.train, strategy, degree, parallelism | backend, placed):
        for (loss, norm), (exact, exact_norm) in zip(steps, expected, strict=True):
            assert loss == pytest.approx(exact, rel=1e-6)
            assert norm == pytest.approx(exact_norm, rel=2e-5)  # a norm of torch in float32 is no better
    assert expected[-1][0] < expected[0][0] - 0.5
