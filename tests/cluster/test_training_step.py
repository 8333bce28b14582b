"""The predicted time and memory of a training step: against closed forms, and memory against a real tiny run."""

import gc
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.context_parallel import ContextParallel, UsageError, context_parallel_attention
from megatron.context_parallel.cluster.description import AttentionRate, Cluster, GemmRate, IntraNode, Nics
from megatron.context_parallel.cluster.simulate.collectives import exchange, ring
from megatron.context_parallel.cluster.simulate.seen_shares import small_blocks
from megatron.context_parallel.cluster.step import mlp_chunks
from megatron.context_parallel.cluster.step.attention_pass import (
    attention_buffers,
    attention_forecast,
    attention_mask,
    attention_plan,
    attention_shape,
)
from megatron.context_parallel.cluster.step.block_memory import BlockMemory
from megatron.context_parallel.cluster.step.layer_time import LayerTime
from megatron.context_parallel.cluster.step.memory import fullest, host_memory, moments, peak
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.moment import ATTENTION, GRADIENTS, MLP, OUTPUT, Moment
from megatron.context_parallel.cluster.step.step_time import forecast_step
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.trainer import training
from megatron.context_parallel.trainer.config.workload import model_of, run_of
from megatron.context_parallel.trainer.model.torch_fsdp2 import TorchFSDP2
from tests.support import box, training_case, zero_case
from tests.support.ideal_model import IDEAL, MODEL

BOX = replace(box.BOX, device=IDEAL)
RUN = TrainConfig(seq_length=1024)
ALONE = BOX.part(1)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
GATHERS = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def seconds(run: TrainConfig, cluster: Cluster = BOX, model: ModelShape = MODEL) -> float:
    return forecast_step(model, run, cluster).seconds


def sizes_of(run: TrainConfig, stage: int = 0) -> dict[str, int]:
    """Bytes of each kind in the moments of a rank; where they differ, those of a later moment."""
    return {item.what: item.bytes for moment in moments(MODEL, run, stage) for item in moment.items}


def attention_flops(model: ModelShape, s: int) -> float:
    return 4 * model.queries * s * s / 2 * model.num_layers


def test_an_ideal_device_takes_the_models_operations():
    """Attention's backward pass computes the scores again: 2.5 times its forward pass, not twice."""
    flops = MODEL.flops_per_sequence(1024)
    forecast = forecast_step(MODEL, RUN, ALONE)
    assert forecast.seconds == pytest.approx((flops + 0.5 * attention_flops(MODEL, 1024)) / 1e12, rel=1e-3)
    assert forecast.mfu == pytest.approx(flops / 1e12 / forecast.seconds)
    assert sum(forecast.parts.values()) == pytest.approx(forecast.seconds)
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 32}
    sparse = replace(MODEL, ffn_hidden_size=4096, moe_router_topk=3, **experts)
    operations = sparse.flops_per_sequence(1024) + 0.5 * attention_flops(sparse, 1024)
    for over in (1, 4):  # a rank that has fewer experts computes more tokens with each
        sharded = replace(sparse, expert_model_parallel_size=over)
        assert forecast_step(sharded, RUN, ALONE).seconds == pytest.approx(operations / 1e12, rel=1e-3)
    for share, fits in ((0.939, True), (0.941, False)):  # tensors may take 94 % of a device
        room = replace(IDEAL, memory_GiB=forecast.memory.bytes / 2**30 / share)
        assert forecast_step(MODEL, RUN, replace(ALONE, device=room)).fits == fits
    assert seconds(replace(RUN, micro_batch_size=2, global_batch_size=4), ALONE) == pytest.approx(4 * forecast.seconds)


def test_recomputation_adds_a_forward_pass_and_keeping_attention_leaves_its_part_out():
    forward = (MODEL.flops_per_sequence(1024) / 3 - 2 * 256 * 1024 * 1024) / 1e12
    attention = attention_flops(MODEL, 1024) / 1e12
    width = 4 * 2 * 256 * 1024 / 1e12  # of a product with hidden states, for a number of its other side
    mlp = 3 * 512 * width
    once = seconds(RUN, ALONE)
    for changes, more in (
        (FULL, forward),
        (FULL | {"recompute_whitelist": ("core_attention",)}, forward - attention),
        (FULL | {"recompute_whitelist": ("qkv", "fc2", "norms")}, forward - (256 + 2 * 128 + 512) * width),
        (FULL | {"recompute_whitelist": ("proj", "fc1")}, forward - (256 + 2 * 512) * width),
        ({"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")}, mlp),
        ({"mlp_chunks_for_training": 2}, mlp),
        ({"recompute_granularity": "selective"}, attention),
        (FULL | {"recompute_method": "block", "recompute_num_layers": 3}, forward * 3 / 4),
    ):
        assert seconds(replace(RUN, **changes), ALONE) == pytest.approx(once + more, rel=1e-3)


def test_kept_products_wait_for_no_tensor_parallel_rank():
    traffic = "tensor-parallel traffic"
    for parallel, names, rings in ((True, ("qkv", "norms"), 1), (True, ("proj", "fc1"), 2), (False, ("qkv", "fc2"), 2)):
        run = replace(RUN, tensor_model_parallel_size=4, sequence_parallel=parallel, **FULL)
        all_again, some = (
            forecast_step(MODEL, replace(run, recompute_whitelist=kept), BOX).parts[traffic] for kept in ((), names)
        )
        one = ring(BOX, ((0, 1, 2, 3),)).seconds(2 * 1024 * 256)
        assert all_again - some == pytest.approx(4 * rings * one)


def test_kept_attention_still_swaps_its_heads():
    run = replace(RUN, context_parallel_size=4, cp_strategy="ulysses")
    cluster = replace(
        BOX, device=replace(IDEAL, attention=(AttentionRate(rows=1, forward_TFLOP_s=1e6, backward_TFLOP_s=1e6),))
    )
    kept = forecast_step(MODEL, replace(run, **FULL, recompute_whitelist=("core_attention",)), cluster).parts
    swap = 256 * (256 + 2 * 128) * 2 * 3 / 4 / 100e9  # queries, keys and values
    exposed = "attention's exposed communication"
    assert kept[exposed] - forecast_step(MODEL, run, cluster).parts[exposed] == pytest.approx(4 * swap, rel=1e-3)
    in_rounds = replace(run, cp_strategy="ulysses:head_rounds=2")  # nothing is kept that is swapped
    again = forecast_step(MODEL, replace(in_rounds, **FULL, recompute_whitelist=("core_attention",)), cluster).parts
    assert again[exposed] == forecast_step(MODEL, in_rounds, cluster).parts[exposed]


def test_rates_of_products_memory_and_launches_count():
    slow = replace(IDEAL, memory_GB_s=1e-3)
    norms = 4 * (4 * 256 + 6 * 256 + 2 * 384 + 3 * 512 + 6 * 256 + 6 * 256 + 2 * 384 + 5 * 512) + 5 * 256
    parts = forecast_step(MODEL, RUN, replace(ALONE, device=slow)).parts
    assert parts["norms and the like"] == pytest.approx(norms * 1024 * 2 / 1e6, rel=1e-6)
    assert parts["optimizer"] == pytest.approx(MODEL.parameters * 42 / 1e6)
    loss = 4 * 256 * 2 + 1024 * (13 * 4 + 2 * 2)  # bytes of a token, forward and backward
    products = 3 * 2 * (1024 * 256 + 256 * 1024 + 1024 * 1024)  # as slow as memory gives the matrices
    assert parts["logits and loss"] == pytest.approx((1024 * loss + products) / 1e6)
    parts = forecast_step(MODEL, RUN, replace(ALONE, device=replace(IDEAL, kernel_us=1e6))).parts
    assert parts["kernel launches"] == 4 * (11 + 15) + 2 + 20
    sizes = GemmRate(size=256, TFLOP_s=1), GemmRate(size=1024, TFLOP_s=3)
    parts = forecast_step(MODEL, RUN, replace(ALONE, device=replace(IDEAL, gemm=sizes))).parts
    rate = {256: 1 + 2 / 3, 512: 2.0, 1024: 2 + 1 / 3}  # of 1024 x 256 by 256 x n, between cubes of 256 and 1024
    product = {n: 2 * 1024 * 256 * n / rate[n] / 1e12 for n in rate}
    per_layer = product[512] + product[256] + product[1024] + product[512]
    assert parts["products of matrices"] == pytest.approx(3 * 4 * per_layer, rel=1e-6)


def test_products_in_fp8_take_their_own_rate_and_casts():
    run = replace(RUN, fp8="hybrid")
    device = replace(IDEAL, gemm=None, peak_fp8_TFLOP_s=2.0)
    kinds = ("products of matrices", "logits and loss", "kernel launches")
    wide, narrow = (forecast_step(MODEL, one, replace(ALONE, device=device)).parts for one in (RUN, run))
    one_way_and_back = (1 + 2 * 1.15) / 3  # backward, products add up in float32
    assert [narrow[kind] / wide[kind] for kind in kinds[:2]] == pytest.approx([0.5 * one_way_and_back, 1.0])
    slow = replace(device, memory_GB_s=1e-3, kernel_us=1e6)
    wide, narrow = (forecast_step(MODEL, one, replace(ALONE, device=slow)).parts for one in (RUN, run))
    widths = (256 + 256 + 256 + 512) + (512 + 256 + 1024 + 256)  # of inputs, and of gradients of outputs
    weights = 256 * 512 + 256 * 256 + 256 * 1024 + 512 * 256
    casts = narrow["norms and the like"] - wide["norms and the like"]
    assert casts == pytest.approx(4 * 4 * 1024 * widths / 1e6)
    for gathered_in_8_bits, size in ((False, 4), (True, 2)):  # weights are cast once for all micro batches
        several = replace(run, global_batch_size=8, fp8_param_gather=gathered_in_8_bits)
        optimizer = forecast_step(MODEL, several, replace(ALONE, device=slow)).parts["optimizer"]
        assert optimizer - wide["optimizer"] == pytest.approx(size * 4 * weights / 1e6)
    assert narrow["kernel launches"] - wide["kernel launches"] == 4 * (4 + 4)
    with pytest.raises(UsageError, match=r"^--fp8-format hybrid: ideal has no device.peak_fp8_TFLOP_s; leave it out$"):
        forecast_step(MODEL, run, ALONE)


def test_a_collective_uses_every_nic_of_its_nodes():
    """8 ranks on 2 nodes: 4 rings, each with a quarter, cross by a NIC of their own; or by the one they share."""
    everyone = (tuple(range(8)),)
    assert ring(BOX, everyone).seconds(1e9) == pytest.approx(7 / 8 / 4 / 10)
    assert ring(replace(BOX, nics=replace(BOX.nics, per_node=1)), everyone).seconds(1e9) == pytest.approx(7 / 8 / 10)
    inside = tuple(range(4)), tuple(range(4, 8))
    assert ring(BOX, inside).seconds(1e9) == pytest.approx(3 / 4 / 100)
    shared = replace(BOX, inside=IntraNode(GB_s=100, latency_us=10, shared=True))
    assert ring(shared, inside).seconds(1e9) == pytest.approx(4 * 3 / 4 / 100 + 3 * 10e-6)
    crossing = tuple((i, i + 4) for i in range(4))
    assert ring(BOX, crossing).seconds(1e9) == pytest.approx(1 / 2 / 10)
    assert exchange(BOX, crossing).seconds(1e9) == pytest.approx(1 / 10)


def test_what_ranks_share_is_sent_and_hidden():
    run = replace(RUN, context_parallel_size=8, seq_length=8192)
    count, part = MODEL.parameters, "gradients and weights, exposed"
    whole = 7 / 8 / 4 / 10e9  # seconds a byte

    def sent(**changes) -> float:
        return forecast_step(MODEL, replace(run, **changes), BOX).parts[part]

    assert sent() == pytest.approx(2 * 4 * count * whole)
    assert sent(data_parallel_sharding_strategy="optim") == pytest.approx((4 + 2) * count * whole)
    # The work of a micro batch hides all but one layer's part.
    assert sent(data_parallel_sharding_strategy="optim", **GATHERS) == pytest.approx((4 + 2) * count * whole / 4)
    batch = {"global_batch_size": 3, "data_parallel_sharding_strategy": "optim_grads_params"}
    assert sent(**batch) == pytest.approx(3 * (4 + 2 + 2) * count * whole)
    batch["data_parallel_sharding_strategy"] = "optim_grads"
    assert sent(**batch) == pytest.approx((3 * 4 + 2) * count * whole)


def test_gradients_of_micro_batches_are_added():
    run, part = replace(RUN, global_batch_size=4), "sums of gradients"
    count, memory = MODEL.parameters, 1e9 * IDEAL.memory_GB_s

    def added(**changes) -> float:
        return forecast_step(MODEL, replace(run, **changes), BOX).parts[part]

    assert added(global_batch_size=1) == 0
    assert added() == pytest.approx(3 * (2 + 8) * count / memory)
    assert added(gradient_accumulation_fusion=True) == pytest.approx(3 * 8 * count / memory)
    assert added(grad_reduce_in_bf16=True) == pytest.approx(3 * (2 + 4) * count / memory)
    shared = {"context_parallel_size": 8, "seq_length": 8192, "data_parallel_sharding_strategy": "optim_grads"}
    assert added(**shared) == pytest.approx(3 * (2 + 8) * (count // 8) / memory)


def test_what_is_sent_in_fewer_bits():
    run, part = replace(RUN, context_parallel_size=8, seq_length=8192), "gradients and weights, exposed"
    run = replace(run, data_parallel_sharding_strategy="optim", grad_reduce_in_bf16=True, fp8_param_gather=True)
    assert forecast_step(MODEL, run, BOX).parts[part] == pytest.approx((2 + 1) * MODEL.parameters * 7 / 8 / 4 / 10e9)
    assert sizes_of(run)["gradients"] == 2 * MODEL.parameters


def test_tensor_parallel_ranks_exchange_hidden_states():
    run, part = replace(RUN, tensor_model_parallel_size=4), "tensor-parallel traffic"
    fast = replace(BOX, device=replace(IDEAL, gemm=(GemmRate(size=1, TFLOP_s=1e9),)))
    one = 1024 * 256 * 2 * 3 / 4 / 100e9
    loss = 6 * 1024 * 4 * 3 / 4 / 100e9
    assert forecast_step(MODEL, run, fast).parts[part] == pytest.approx((4 * 8 + 2 + 2) * one + loss, rel=1e-4)
    parallel = replace(run, sequence_parallel=True)
    assert forecast_step(MODEL, parallel, fast).parts[part] == pytest.approx((4 * 10 + 4) * one + loss, rel=1e-4)
    # Products of the backward pass hide what is summed meanwhile: 2 x 65 us of a layer behind 17 and 67 us.
    slow = replace(BOX, device=replace(IDEAL, gemm=(GemmRate(size=1, TFLOP_s=100),)))
    hidden = sum(min(2 * one, 2 * 1024 * 256 * n / 4 / 100e12) for n in (512, 1024))
    expected = (4 * 8 + 2 + 2) * one + loss - 4 * hidden
    assert forecast_step(MODEL, run, slow).parts[part] == pytest.approx(expected, rel=1e-4)
    # With user buffers each product hides its own gather, here all of it, and three of four parts of its own sum.
    slow = replace(BOX, device=replace(IDEAL, gemm=(GemmRate(size=1, TFLOP_s=1),)))
    beside = replace(parallel, tp_comm_overlap=True)
    assert forecast_step(MODEL, beside, slow).parts[part] == pytest.approx((4 + 4 * 2 / 4) * one + loss, rel=1e-4)
    # The traffic takes some of 132 multiprocessors from the products.
    alone, slower = (forecast_step(MODEL, of, slow).parts["products of matrices"] for of in (parallel, beside))
    taken = ((512, (1, 4, 8)), (256, (24, 1)), (1024, (1, 2, 4)), (512, (4, 1)))  # of products with 256, by other width
    share = 0.0
    for width, counts in taken:
        share += width * sum(count / (132 - count) for count in counts)
    assert slower - alone == pytest.approx(4 * share * 2 * 1024 * 256 / 4 / 1e12, rel=1e-4)


def test_copies_to_host_memory_wait_where_layers_do_not_hide_them():
    """A layer of `MODEL` has 256 x 2 bytes of input and of kept output for each of 1024 tokens."""
    kept = {"recompute_whitelist": ("core_attention",), "offload_checkpoints": True, "offload_kept": True}
    on_device, on_host = (replace(RUN, **FULL, **more) for more in ({}, kept))
    size = 1024 * (256 * 2 + 256 * 2 + 4 * MODEL.num_attention_heads)  # with the log-sum-exp

    def exposed(rate: float) -> float:
        cluster = replace(ALONE, device=replace(IDEAL, host_GB_s=rate))
        return forecast_step(MODEL, on_host, cluster).parts["host memory, exposed"]

    layers, fast, slow = MODEL.num_layers, 1e6, 1e-3
    assert exposed(fast) == pytest.approx(size / (1e9 * fast))  # what the first layer of the backward pass needs
    at_work = 2 * layers * size / (1e9 * slow) - exposed(slow)  # all layers, three times forward and once backward
    logits = 3 * 2 * 256 * 1024 * 1024 / 1e12
    in_place = seconds(replace(on_device, recompute_whitelist=("core_attention",)), ALONE)
    assert at_work == pytest.approx(in_place - logits, rel=1e-3)
    with pytest.raises(UsageError, match=r"offloading of activations: .* has no device.host_GB_s"):
        seconds(on_host, ALONE)


def test_layers_without_a_window_take_their_time_and_memory():
    run = replace(RUN, context_parallel_size=4, recompute_granularity="selective")  # attention once more
    window, some = (replace(MODEL, window_size=63, full_layers=layers) for layers in (0, 3))
    without, within, both = (forecast_step(model, run, BOX).parts for model in (MODEL, window, some))
    for part in ("attention", "attention's exposed communication"):
        assert both[part] == pytest.approx((3 * without[part] + within[part]) / 4)
    assert within["attention"] < without["attention"] / 2
    assert attention_buffers(some, run) == attention_buffers(MODEL, run) > attention_buffers(window, run)


def test_a_pipeline_waits_for_its_first_and_last_micro_batches():
    far = replace(BOX, nics=replace(BOX.nics, GB_s=1e9), inside=IntraNode(GB_s=1e9, latency_us=0))
    run = replace(RUN, pipeline_model_parallel_size=4, global_batch_size=6)
    forecast = forecast_step(MODEL, run, far)
    layer = (MODEL.flops_per_sequence(1024) + 0.5 * attention_flops(MODEL, 1024)) / 1e12
    logits = 3 * 2 * 256 * 1024 * 1024 / 1e12
    layer = (layer - logits) / 4
    assert forecast.parts["pipeline bubble"] == pytest.approx(3 * layer, rel=1e-3)
    assert forecast.seconds == pytest.approx(6 * (layer + logits) + 3 * layer, rel=1e-3)
    half = replace(run, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert forecast_step(MODEL, half, far).parts["pipeline bubble"] == pytest.approx(2 * layer / 2, rel=1e-3)
    slow = replace(far, inside=IntraNode(GB_s=1, latency_us=0))
    assert forecast_step(MODEL, run, slow).parts["pipeline traffic"] == pytest.approx(6 * 2 * 1024 * 256 * 2 / 1e9)
    # Interleaved, it is hidden but for the first and the last 2 x 2 - 1 messages.
    assert forecast_step(MODEL, half, slow).parts["pipeline traffic"] == pytest.approx(3 * 2 * 1024 * 256 * 2 / 1e9)
    tied = replace(MODEL, untie_embeddings_and_output_weights=False)
    shared = forecast_step(tied, run, slow).parts["gradients and weights, exposed"]
    assert shared == pytest.approx(4 * MODEL.padded_vocab_size * 256 / 1e9)  # the two ranks that have the embedding


def test_context_groups_beside_each_other_share_the_nics():
    slow = replace(
        BOX, device=replace(IDEAL, attention=(AttentionRate(rows=1, forward_TFLOP_s=1e9, backward_TFLOP_s=1e9),))
    )
    keys = 256 * 2 * 2 * 32 * 2  # bytes of a chunk's keys and values, half of the heads
    for nics, groups in ((4, 1), (2, 2), (1, 2)):
        cluster = replace(slow, nics=replace(slow.nics, per_node=nics))
        run = replace(RUN, context_parallel_size=4, tensor_model_parallel_size=2)
        forecast = attention_forecast(MODEL, run, cluster, False)
        assert forecast.seconds == pytest.approx(3 * keys * groups / 10e9, rel=1e-3)
    thin = replace(slow, nodes=4, nodes_per_switch=2, oversubscription=8.0)  # 8 NICs of 10 GB/s and an uplink of 10
    run = replace(run, context_parallel_size=8)
    assert attention_forecast(MODEL, run, thin, False).seconds == pytest.approx(7 * keys / 2 * 2 / 10e9, rel=1e-3)
    apart = replace(RUN, context_parallel_size=2, data_parallel_size=2, global_batch_size=2)
    assert attention_forecast(MODEL, apart, cluster, False).seconds == pytest.approx(4 * keys / 100e9, rel=1e-3)
    bus = replace(cluster, inside=replace(cluster.inside, shared=True))
    assert attention_forecast(MODEL, apart, bus, False).seconds == pytest.approx(4 * 4 * keys / 100e9, rel=1e-3)


def test_ranks_that_share_processors_take_longer():
    run = replace(RUN, tensor_model_parallel_size=2, context_parallel_size=4)
    far = replace(BOX, inside=IntraNode(GB_s=1e9, latency_us=0), nics=Nics(per_node=4, GB_s=1e9, latency_us=0))
    alone, shared = (forecast_step(MODEL, run, replace(far, shared_cores=cores)) for cores in (None, 2))
    flops = MODEL.flops_per_sequence(1024)
    assert alone.mfu == pytest.approx(flops / 8 / 1e12 / alone.seconds)
    for part in ("attention", "products of matrices", "logits and loss"):
        assert shared.parts[part] == pytest.approx(4 * alone.parts[part], rel=1e-2)


def test_key_heads_are_repeated_for_more_tensor_parallel_ranks():
    for tensor, width in ((4, 256 // 4 + 2 * 128 // 4), (8, 256 // 8 + 2 * 32)):
        time = LayerTime(MODEL, replace(RUN, tensor_model_parallel_size=tensor), IDEAL)
        assert time.products["qkv"] == pytest.approx(2 * 1024 * 256 * width / 1e12)


def test_the_fullest_stage_has_most_micro_batches_or_the_logits():
    run = replace(RUN, pipeline_model_parallel_size=2, global_batch_size=8)
    norm = 2 * 256 + 4
    attention = norm + 2 * 256 + 2 * 2 * (256 + 128) + 4 * 8
    for stage, micro_batches in enumerate((2, 1)):
        sizes = sizes_of(run, stage)
        assert sizes["attention activations"] == 2 * micro_batches * 1024 * attention
        inner = norm + 2 * 256 + (2 + 1) * 2 * 512  # the last moment has an MLP less
        assert sizes["MLP activations"] == (2 * micro_batches - 1) * 1024 * inner
    larger = replace(MODEL, padded_vocab_size=16384)
    assert [fullest(model, run)[0] for model in (MODEL, larger)] == [0, 1]
    assert (peak(MODEL, run).name, peak(larger, run, 1).name) == (MLP, OUTPUT)
    halves = replace(run, virtual_pipeline_model_parallel_size=2)  # three of them are in flight in the last stage
    for moment in moments(MODEL, halves, 1)[:2]:
        assert moment.name in (OUTPUT, MLP)
        sizes = {item.what: item.bytes for item in moment.items}
        assert sizes["MLP activations"] == 3 * 1024 * inner
    outputs = {
        stage: {item.what: item.bytes for item in moments(MODEL, replace(halves, implementation="cpu"), stage)[0].items}
        for stage in (0, 1)
    }
    assert [outputs[stage]["pipeline outputs"] for stage in (0, 1)] == [5 * 1024 * 256 * 2, 2 * 1024 * 256 * 2]


def _backward_peak(
    strategy: str, heads: int, kv_heads: int, dtype: str = "fp32", tokens: int = 256, window: int | None = None
) -> int:
    """Bytes of the allocator at the peak of a backward pass, above what the forward pass keeps."""
    cp = ContextParallel(strategy)
    how = {"requires_grad": True, "dtype": {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]}
    q, k, v = (torch.randn(tokens, 1, number, 64, **how) for number in (heads, kv_heads, kv_heads))
    seen = {"window": (window - 1, 0)} if window else {}
    out = context_parallel_attention(q, k, v, cp=cp, causal=True, **seen)
    activities = [torch.profiler.ProfilerActivity.CPU]
    gradient = torch.ones_like(out)
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        out.backward(gradient)
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return gradient.nbytes + max(accumulate(sizes))


@pytest.mark.parametrize(("token_rounds", "kv_heads"), [(1, 4), (2, 8), (8, 4)])
def test_memory_of_rounds_of_tokens(ranks, token_rounds, kv_heads):
    strategy = f"ulysses:layout=cyclic,token_rounds={token_rounds}"
    how = {"dtype": "fp32", "implementation": "cpu", "context_parallel_size": 2}
    run = TrainConfig(seq_length=512, cp_strategy=strategy, **how)
    model = replace(MODEL, num_attention_heads=8, num_query_groups=kv_heads, kv_channels=64)
    for measured in ranks(2, _backward_peak, strategy, 8, kv_heads):
        assert attention_buffers(model, run) == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(("window", "kv_heads"), [(32, 8), (200, 2)])
def test_memory_under_a_window(ranks, window, kv_heads):
    """On a CPU: the first rows of the block are a piece of their own, and the others are computed in tiles."""
    run = TrainConfig(seq_length=1024, cp_strategy="ring", dtype="fp32", implementation="cpu")
    model = replace(MODEL, num_attention_heads=8, num_query_groups=kv_heads, kv_channels=64, window_size=window)
    (measured,) = ranks(1, _backward_peak, "ring", 8, kv_heads, "fp32", 1024, window)
    assert attention_buffers(model, run) == pytest.approx(measured, rel=0.06)


def test_a_group_with_gaps_is_simulated_in_part():
    run = replace(RUN, context_parallel_size=32, tensor_model_parallel_size=2, seq_length=32768)
    cluster = replace(BOX, nodes=16)
    every = attention_forecast(MODEL, run, cluster, True)
    few = attention_forecast(MODEL, run, cluster, True, all_up_to=1)
    assert (every.symmetry.ranks, few.symmetry.ranks) == (32, 2)
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"dtype": "fp8"}, "dtype fp8: unknown; give one of fp32, bf16, fp16"),
        ({"global_batch_size": 3, "data_parallel_size": 2}, "--global-batch-size 3: .* give 4"),
        ({"context_parallel_size": 3}, "--seq-length 1024: .* give 1026"),
        ({"recompute_granularity": "full"}, "needs --recompute-method and --recompute-num-layers"),
        ({"pipeline_model_parallel_size": 3}, "--pipeline-model-parallel-size 3: does not divide --num-layers 4"),
        ({"context_parallel_size": 2, "data_parallel_sharding_strategy": "zero"}, "give one of no_shard, optim"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        seconds(replace(RUN, **changes))


def test_sharding_divides_what_it_names():
    run = replace(RUN, context_parallel_size=8, dtype="bf16")
    count, layer = MODEL.parameters, MODEL.layer_parameters()

    def sizes(sharding: str) -> dict[str, int]:
        return sizes_of(replace(run, data_parallel_sharding_strategy=sharding))

    whole = {"weights": 2 * count, "gradients": 4 * count, "optimizer": 12 * count}
    expected = {
        "no_shard": whole,
        "optim": whole | {"optimizer": 12 * count // 8},
        "optim_grads": {"weights": 2 * count, "gradients": 4 * count // 8, "optimizer": 12 * count // 8},
        "optim_grads_params": {what: size // 8 for what, size in whole.items()},
    }
    for sharding, parts in expected.items():
        assert sizes(sharding).items() >= parts.items()
    assert sizes("optim_grads_params")["gathered weights"] == 2 * count  # Megatron-FSDP gathers 10^9 / 2 ahead
    own = moments(MODEL, replace(run, data_parallel_sharding_strategy="optim_grads_params", use_torch_fsdp2=True))
    rest = count - MODEL.num_layers * layer - MODEL.padded_vocab_size * MODEL.hidden_size
    gathered = [item.bytes for moment in own for item in moment.items if item.what == "gathered weights"]
    assert max(gathered) == 2 * (2 * layer + rest)
    whole = replace(run, data_parallel_sharding_strategy="optim_grads")
    (last,) = [one for one in moments(MODEL, whole) if one.name == GRADIENTS]
    assert last.items[-1].bytes == 4 * count


def test_the_optimizer_updates_all_experts_that_it_shards():
    """Data and context ranks share them out, however many of them have the weights of an expert."""
    experts = replace(MODEL, num_experts=8, moe_ffn_hidden_size=64)
    run = replace(RUN, context_parallel_size=4, data_parallel_sharding_strategy="optim")
    for over in (1, 4):
        items = moments(replace(experts, expert_model_parallel_size=over), run)[-1].items
        sizes = {item.what: item.bytes for item in items}
        assert sizes["optimizer"] == 3 * sizes["Adam's own numbers"] == 12 * experts.parameters // 4


def test_the_buffers_of_a_ring():
    """Backward: the gradient of queries, 2 received chunks of keys, gradients of 4 chunks of keys, and the kernel."""
    run = replace(RUN, context_parallel_size=8)
    queries, keys, statistic = 128 * 256, 128 * 256, 4 * 128 * 8
    chunks = 2 * queries + 2 * statistic + 4 * queries + 2 * 2 * keys + 4 * 4 * keys
    of_a_block = 2 * queries + 2 * keys + 2 * 2 * queries  # gradients; of keys also for each query head
    kernel = 4 * queries + 2 * queries + of_a_block - 4 * keys  # a float32 sum, the output; without the last partial
    assert sizes_of(run)["attention buffers"] == chunks + kernel


def test_gloo_copies_what_it_gathers_until_all_is_there():
    """Of 4 chunks of keys and values; and the rank's own is in the gathered ones too, from then on."""
    run = replace(RUN, context_parallel_size=4, cp_strategy="allgather", implementation="cpu")
    shape, plan = attention_shape(MODEL, run), attention_plan(MODEL, run, True)
    alone = replace(plan, steps=tuple([tuple([replace(step, comm=()) for step in steps]) for steps in plan.steps]))
    blocks = small_blocks(plan.layout, plan.n, attention_mask(MODEL), run.seq_length)
    before, after = (BlockMemory(one, shape, blocks).of_steps(1) for one in (alone, plan))
    chunk = 256 * 2 * 128 * 2
    assert [more - less for more, less in zip(after, before, strict=True)] == [5 * chunk, chunk, chunk]


def _bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def _weights_and_gradients(chunk) -> dict[str, int]:
    weights = [*chunk.parameters()]
    if isinstance(chunk, DistributedDataParallel):
        return {"weights": sum(map(_bytes, weights)), "gradients": sum(x.grad_data.nbytes for x in chunk.buffers)}
    if isinstance(chunk, TorchFSDP2):
        return {"weights": sum(map(_bytes, weights)), "gradients": sum(_bytes(x.grad) for x in weights)}
    groups = chunk.param_and_grad_buffer.parameter_groups
    return {
        "weights": sum(group.model_weight_buffer.data.nbytes for group in groups),
        "gradients": sum(group.main_grad_buffer.data.nbytes for group in groups),
    }


def _real_memory(family: str, changes: dict) -> tuple[dict, dict]:
    """Bytes that a rank holds after an iteration, and those predicted."""
    recompute = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    args = training_case.case_args(
        family, hidden_size=128, kv_channels=32, ffn_hidden_size=128, train_iters=1, **recompute, **changes
    )
    with training_case.groups(args):
        state = training_case.build(args)
        data = [training_case.batches(args, 0) for _ in state.model]
        training.train_loop(args, state, training_case.Recorder(), data, None, 0.0)
        inner = state.optimizer.optimizer
        numbers = [value for kept in inner.state.values() for value in kept.values() if torch.is_tensor(value)]
        numbers = [value for value in numbers if value.ndim]
        if args.params_dtype is not torch.float32 and not args.use_torch_fsdp2:
            numbers += [parameter for group in inner.param_groups for parameter in group["params"]]
        real = _weights_and_gradients(state.model[0]) | {"optimizer": sum(map(_bytes, numbers))}
    predicted = {item.what: item.bytes for item in moments(model_of(args), run_of(args))[-1].items}
    return real, {name: predicted[name] for name in real}


@contextmanager
def _collectives_of_one_rank():
    """FSDP2 gathers copies of this rank's parts, and gets the first part of its own sums.

    The threads of gloo free tensors some time after a collective, which would add to the peak.
    """

    def gather(whole: Tensor, mine: Tensor, **_: object) -> None:
        for part in whole.view(-1, mine.numel()):
            if part.data_ptr() != mine.data_ptr():  # one of them is `mine`
                part.copy_(mine.view(-1))

    def scatter(output: Tensor, input: Tensor, **_: object) -> None:
        output.view(-1).copy_(input.view(-1)[: output.numel()])

    calls = {"all_gather_single": gather, "reduce_scatter_single": scatter}  # in torch 2.13
    calls |= {"all_gather_into_tensor": gather, "reduce_scatter_tensor": scatter}  # before
    with pytest.MonkeyPatch.context() as patch:
        for name, call in calls.items():
            patch.setattr(dist, name, call, raising=False)
        yield


def _allocated(changes: dict) -> list[tuple[int, int]]:
    """Bytes of the allocator at its peak before the first step, and in the third one, each with those predicted."""
    sizes = {"num_layers": 4, "hidden_size": 256, "kv_channels": 64, "ffn_hidden_size": 704, "global_batch_size": 2}
    args = training_case.case_args("llama", context_parallel_size=2, **sizes, **changes)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with training_case.groups(args), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        state = training_case.build(args)
        data = [training_case.batches(args, 0) for _ in state.model]
        for _ in range(3):
            gc.collect()
            with torch.profiler.record_function("a step"), _collectives_of_one_rank():
                training.train_step(args, state, data, 0.0)
    total, peaks = 0, [0]
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "a step":
            peaks.append(total)
        if event.name() == "[memory]":
            total += event.nbytes()
            peaks[-1] = max(peaks[-1], total)
    building, *steps = moments(model_of(args), run_of(args))
    return [(peaks[0], building.bytes), (peaks[-1], max(moment.bytes for moment in steps))]


def test_memory_of_fsdp2_is_what_is_allocated(ranks):
    found = ranks(2, _allocated, zero_case.WAYS["torch_fsdp2"] | {"recompute_granularity": None})
    for measured, predicted in [case for of_rank in found for case in of_rank]:
        assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    "changes", [{"bf16": True, "params_dtype": torch.bfloat16}, {"use_distributed_optimizer": False}]
)
def test_memory_is_that_of_a_real_run(ranks, changes):
    for real, predicted in ranks(2, _real_memory, "llama", {"context_parallel_size": 2, **changes}):
        assert real == predicted


@pytest.mark.parametrize("way", ["torch_fsdp2", "optim_grads_params, 2 instances"])
def test_memory_of_what_ranks_share_out(ranks, way):
    changes = {"context_parallel_size": 2, "params_dtype": torch.bfloat16, "bf16": True}
    runs = ranks(4, _real_memory, "llama", changes | zero_case.WAYS[way])
    for part in ("weights", "gradients", "optimizer"):  # Megatron-FSDP pads its buckets of weights and gradients
        total = sum(real[part] for real, _ in runs)
        assert total == pytest.approx(
            sum(predicted[part] for _, predicted in runs), rel=0 if part == "optimizer" else 5e-3
        )


def test_an_iteration_has_a_fixed_cost():
    dear = replace(BOX, iteration_ms=250.0)
    run = replace(RUN, global_batch_size=4)
    assert forecast_step(MODEL, run, dear).seconds == pytest.approx(forecast_step(MODEL, run, BOX).seconds + 0.25)


def test_checkpoints_in_host_memory_are_on_the_device_one_at_a_time():
    run = replace(RUN, **FULL)
    host = replace(run, offload_checkpoints=True)
    inputs = MODEL.num_layers * 1024 * 256 * 2
    assert (host_memory(MODEL, run), host_memory(MODEL, host)) == (0, inputs)
    before, after = sizes_of(run), sizes_of(host)
    assert before["recomputed layers"] - after["recomputed layers"] == inputs
    assert after["ends of the layer at work"] - before["ends of the layer at work"] == 1024 * 256 * 2


def test_parts_of_layers_in_host_memory_are_on_the_device_for_the_last_layers():
    """Those of the last, and of the one before it while the last is differentiated. Small tensors stay."""
    fused = replace(RUN, implementation="transformer_engine", min_offloaded_tensor_size=2**17)
    run = replace(fused, offload_modules=("core_attn", "attn_proj"))
    queries, keys = 2 * 1024 * 256, 2 * 1024 * 128
    assert sizes_of(run)["offloaded activations"] == -(MODEL.num_layers - 2) * (2 * queries + 2 * keys)
    assert host_memory(MODEL, run) == (MODEL.num_layers - 1) * (3 * queries + 2 * keys)  # the output twice
    assert host_memory(MODEL, replace(run, min_offloaded_tensor_size=2**18)) == (MODEL.num_layers - 1) * 3 * queries
    assert host_memory(MODEL, replace(fused, offload_modules=("qkv_linear",))) == (MODEL.num_layers - 1) * 2 * queries


def test_an_optimizer_in_host_memory_is_not_on_the_device():
    run = replace(RUN, data_parallel_sharding_strategy="optim", context_parallel_size=2)
    part = replace(run, optimizer_cpu_offload=True, optimizer_offload_fraction=0.25)
    assert host_memory(MODEL, part) == 16 * MODEL.parameters // 2 // 4
    assert sizes_of(part)["optimizer"] == 3 * sizes_of(run)["optimizer"] // 4 == 9 * MODEL.parameters // 2


def test_shards_of_fsdp2_in_host_memory_are_not_on_the_device():
    run = replace(RUN, data_parallel_sharding_strategy="optim_grads_params", context_parallel_size=2)
    on_device = replace(run, use_torch_fsdp2=True)
    on_host = replace(on_device, optimizer_cpu_offload=True)
    for before, after in zip(moments(MODEL, on_device)[1:], moments(MODEL, on_host)[1:], strict=True):  # once built
        shards = {item.what: item.bytes for item in after.items if item.what in ("weights", "gradients", "optimizer")}
        assert shards["weights"] == shards["optimizer"] == 0
        assert shards.get("gradients", 0) <= 4 * MODEL.layer_parameters() // 2  # on their way
        assert {one for one in before.items if one.what not in shards} >= {
            one for one in after.items if one.what not in (*shards, "Adam's own numbers")
        }
    assert host_memory(MODEL, on_host) == 16 * MODEL.parameters // 2


@pytest.mark.parametrize(("dtype", "kv_heads"), [("fp32", 4), ("bf16", 1)])
def test_memory_of_rounds_that_share_key_heads(ranks, dtype, kv_heads):
    how = {"dtype": dtype, "implementation": "cpu", "context_parallel_size": 2}
    run = TrainConfig(seq_length=512, cp_strategy="ulysses:head_rounds=4", **how)
    model = replace(MODEL, num_attention_heads=16, num_query_groups=kv_heads, kv_channels=64)
    for measured in ranks(2, _backward_peak, run.cp_strategy, 16, kv_heads, dtype):
        assert attention_buffers(model, run) == pytest.approx(measured, rel=0.04)


def test_gradients_may_travel_in_the_dtype_of_the_model():
    assert attention_shape(MODEL, RUN).partial_itemsize == 4
    assert attention_shape(MODEL, replace(RUN, partial_dtype="bf16")).partial_itemsize == 2
    with pytest.raises(UsageError, match="partial_dtype fp8: unknown; give one of fp32, bf16, fp16"):
        replace(RUN, partial_dtype="fp8")


def test_copies_of_a_sharded_optimizer_gather_in_their_node_and_add_each_shard():
    run = replace(RUN, context_parallel_size=8, data_parallel_sharding_strategy="optim")
    parts = forecast_step(MODEL, replace(run, num_distributed_optimizer_instances=2), BOX.part(8)).parts
    nodes, across = (tuple(range(4)), tuple(range(4, 8))), tuple((i, i + 4) for i in range(4))
    of_node, of_shard = ring(BOX.part(8), nodes), ring(BOX.part(8), across)
    p = MODEL.parameters
    expected = of_node.seconds(2 * p) + of_node.seconds(4 * p) + 2 * of_shard.seconds(4 * p / 4)
    assert parts["gradients and weights, exposed"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("how,full", [("allgather", 4 * 1024), ("alltoall", 2 * 1024)])
def test_tokens_go_to_the_ranks_of_their_experts_and_back(how, full):
    """A rank gets the tokens of all 4, or sends 3 of 4 of its own to 2 experts each: in bytes the same share."""
    sparse = replace(MODEL, num_experts=8, moe_ffn_hidden_size=64, expert_model_parallel_size=4)
    run = replace(RUN, data_parallel_size=4, global_batch_size=4, moe_token_dispatcher_type=how)
    fast = replace(BOX.part(4), inside=replace(BOX.inside, latency_us=0))
    hidden = full * 256 * 2 * 3 / 4 / (BOX.inside.GB_s * 1e9)
    parts = forecast_step(sparse, run, fast).parts
    assert parts["expert-parallel traffic"] == pytest.approx(4 * 2 * 2 * hidden)
    again = forecast_step(sparse, replace(run, **FULL), fast).parts
    assert again["expert-parallel traffic"] == pytest.approx(4 * 2 * 3 * hidden)


def test_chunks_of_loss_and_mlp_need_less_memory_and_more_time():
    run = replace(RUN, dtype="fp32")
    whole, loss, mlp = (
        sizes_of(replace(run, **chunks))
        for chunks in ({}, {"cross_entropy_chunk_size": 64}, {"mlp_chunks_for_training": 4})
    )
    weight, hidden = MODEL.hidden_size * MODEL.padded_vocab_size, run.tokens * MODEL.hidden_size
    logits = (run.tokens - 64) * MODEL.padded_vocab_size  # fewer; and gradients: of the weight again, of the input
    small = run.tokens * (MODEL.hidden_size * 4 + 13)  # the output layer's input, masks and labels
    assert loss["logits and loss"] == whole["logits and loss"] - 4 * logits - small + 4 * (weight + 2 * hidden)
    inner = 4 * run.tokens * MODEL.mlp_width * (2 + 1)
    assert whole["MLP activations"] - mlp["MLP activations"] == inner * (MODEL.num_layers - 1)
    for chunks in ({"cross_entropy_chunk_size": 64}, {"mlp_chunks_for_training": 4}):
        assert seconds(replace(run, **chunks)) > seconds(run)


@pytest.mark.parametrize("recompute", [FULL, {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}])
def test_by_default_large_mlps_are_cut_where_it_takes_no_time(recompute, monkeypatch):
    """In chunks whose first products return `MLP_AT_ONCE` bytes at most, unless the run asks for one chunk."""
    run = replace(RUN, **recompute)
    whole = replace(run, mlp_chunks_for_training=1)
    assert moments(MODEL, run) == moments(MODEL, whole)
    outputs = RUN.tokens * MODEL.mlp_inputs * RUN.itemsize
    monkeypatch.setattr(mlp_chunks, "MLP_AT_ONCE", outputs // 3)
    assert moments(MODEL, run) == moments(MODEL, replace(run, mlp_chunks_for_training=4))
    assert moments(MODEL, run) != moments(MODEL, whole)
    assert seconds(run) == seconds(whole)
    tensor = {"tensor_model_parallel_size": 2}
    assert moments(MODEL, replace(run, **tensor)) == moments(MODEL, replace(run, **tensor, mlp_chunks_for_training=2))
    kept = {"recompute_whitelist": ("fc1",)} if recompute == FULL else {"recompute_modules": ("core_attn",)}
    two_at_once = [{"recompute_num_layers": 2}] if recompute == FULL else []
    for others in (kept, {"recompute_granularity": None}, *two_at_once):
        plain = replace(run, **others)
        assert moments(MODEL, plain) == moments(MODEL, replace(plain, mlp_chunks_for_training=1))


LONG = 1024
SIZES = {"hidden_size": 64, "ffn_hidden_size": 256, "seq_length": LONG, "max_position_embeddings": LONG}
SIZES |= {"micro_batch_size": 2, "global_batch_size": 2}


def _peaks(family: str, cases: list[dict]) -> list[tuple[int, Moment]]:
    """Bytes of the allocator at the peak of the second step, and the moment that is predicted, of each case."""
    found = []
    for changes in cases:
        args = training_case.case_args(family, use_distributed_optimizer=False, **SIZES | changes)
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        gc.collect()  # what earlier cases left would end in this one
        with training_case.groups(args), profiler as profile, patch.object(training_case, "SEQUENCE", LONG):
            state = training_case.build(args)
            data = [training_case.batches(args, 0)]
            for _ in range(2):
                with torch.profiler.record_function("step"):
                    training.train_step(args, state, data, 0.0)
            training_case.forget_graphs(state.model)
            del state, data
        most = total = steps = 0
        for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            steps += event.name() == "step"
            total += event.nbytes() if event.name() == "[memory]" else 0
            most = max(most, total) if steps == 2 else 0
        found.append((most, peak(model_of(args), run_of(args))))
    return found


TWO, CHUNKS = FULL | {"recompute_num_layers": 2}, {"mlp_chunks_for_training": 2}
WIDE_ATTENTION, NARROW = {"ffn_hidden_size": 8, "kv_channels": 32}, {"ffn_hidden_size": 64, "kv_channels": 2}


@pytest.mark.parametrize(
    ("family", "cases"),
    [
        ("llama", [FULL | WIDE_ATTENTION, FULL | NARROW, FULL | CHUNKS, TWO | CHUNKS]),
        ("gpt3", [TWO | WIDE_ATTENTION, TWO | NARROW, FULL | CHUNKS]),
    ],
)
def test_the_peak_with_recomputation_is_that_of_the_allocator(ranks, family, cases):
    """No hidden states are missing or too many: in attention, where a layer ends, and with chunks of the MLP."""
    (found,) = ranks(1, _peaks, family, cases)
    assert [moment.name for _, moment in found] == [ATTENTION, *[MLP] * (len(cases) - 1)]
    hidden = 2 * LONG * 64 * 4
    missing = [(allocated - moment.bytes) / hidden for allocated, moment in found]
    assert missing == pytest.approx([0] * len(found), abs=0.3)
