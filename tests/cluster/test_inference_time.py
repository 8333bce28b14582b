"""The predicted times of a prefill and of a decode step: against closed forms."""

from dataclasses import replace

import pytest

from megatron.context_parallel.cluster.description import IntraNode, Nics
from megatron.context_parallel.cluster.simulate.collectives import ring
from megatron.context_parallel.cluster.step.decode_time import decode_step
from megatron.context_parallel.cluster.step.layer_time import LayerTime
from megatron.context_parallel.cluster.step.prefill_time import Prefill, prefill_seconds
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.inference.pass_q import RING_PASS_Q
from tests.support.box import BOX
from tests.support.ideal_model import IDEAL, MODEL

CLUSTER = replace(BOX, device=IDEAL)
HEADS, HEAD_DIM, LAYERS = MODEL.num_attention_heads, MODEL.kv_channels, MODEL.num_layers


def attention(pairs: float, tensor: int = 1) -> float:
    """Seconds of as many pairs of a query and a key, at 1 TFLOP/s."""
    return 4 * HEADS / tensor * HEAD_DIM * pairs / 1e12


def test_one_rank_computes_new_tokens_against_all():
    run = TrainConfig(seq_length=1024)
    found = prefill_seconds(MODEL, run, CLUSTER, Prefill(1024, 3072))
    assert found.attention == pytest.approx(LAYERS * attention(1024 * (3072 + 512)))
    assert found.products == pytest.approx(LAYERS * LayerTime(MODEL, run, IDEAL).layer(False).gemm)
    assert found.tensor == 0
    slow = replace(CLUSTER, device=replace(IDEAL, cache_us=7.0))
    for prefill, more in ((Prefill(1024, 3072), 7e-6), (Prefill(1024), 0.0), (Prefill(1024, through_cache=True), 7e-6)):
        without = prefill_seconds(MODEL, run, CLUSTER, prefill).seconds
        assert prefill_seconds(MODEL, run, slow, prefill).seconds == pytest.approx(without + LAYERS * more, rel=1e-9)


def test_keys_hide_behind_blocks_and_outputs_of_pass_q_do_not():
    """4 ranks on 4 nodes: each message has a NIC of 10 GB/s of its own, or three share it."""
    hosts = replace(CLUSTER, nodes=4, devices_per_node=1, inside=None, nics=Nics(per_node=1, GB_s=10, latency_us=3))
    new, cached = 1024, 7168
    run = TrainConfig(seq_length=new, context_parallel_size=4)
    block = attention(new / 4 * (cached + new / 2) / 4)
    keys = (new + cached) / 4 * 2 * MODEL.keys * 2 / 10e9 + 3e-6
    queries = new / 4 * MODEL.queries * 2 / 10e9 + 3e-6
    outputs = 3 * new / 4 * (MODEL.queries * 2 + HEADS * 4) / 10e9 + 3e-6
    for choice, expected in (
        ("ring", 3 * max(keys, block) + block),
        (RING_PASS_Q, 3 * max(queries, block) + block + outputs),
    ):
        prefill = Prefill(new, cached, partial_itemsize=2, choice=choice)
        found = prefill_seconds(MODEL, run, hosts, prefill)
        assert found.attention == pytest.approx(LAYERS * expected, rel=1e-6)


def test_tensor_ranks_add_two_sums():
    run = TrainConfig(seq_length=1024, tensor_model_parallel_size=4)
    found = prefill_seconds(MODEL, run, CLUSTER, Prefill(1024))
    one = ring(CLUSTER.part(4), ((0, 1, 2, 3),)).seconds(1024 * MODEL.hidden_size * 2)
    assert found.tensor == pytest.approx(LAYERS * 4 * one)
    assert found.attention == pytest.approx(LAYERS * attention(1024 * 512, tensor=4))


def test_a_decode_step_reads_weights_and_keys_and_waits_for_messages():
    device = replace(IDEAL, memory_GB_s=1.0, block_us=5.0, kernel_us=2.0)
    weights = 2 * (
        MODEL.hidden_size * (2 * MODEL.queries + 2 * MODEL.keys) + 3 * MODEL.hidden_size * MODEL.ffn_hidden_size
    )
    table, row = 2 * MODEL.padded_vocab_size * MODEL.hidden_size, 2 * MODEL.keys * 2
    found = decode_step(MODEL, TrainConfig(seq_length=1), replace(CLUSTER, device=device), 1000)
    assert found.block == found.attention == pytest.approx(1000 * row / 1e9)
    assert found.step == pytest.approx(LAYERS * (weights / 1e9 + 22e-6 + found.block) + table / 1e9)
    assert decode_step(MODEL, TrainConfig(seq_length=1), replace(CLUSTER, device=device), 1).block == pytest.approx(
        5e-6
    )
    nics = Nics(per_node=1, GB_s=1e6, latency_us=40)
    hosts = replace(CLUSTER, nodes=4, devices_per_node=1, device=device, inside=None, nics=nics)
    found = decode_step(MODEL, TrainConfig(seq_length=4, context_parallel_size=4), hosts, 64, batch=5)
    assert found.blocks == pytest.approx(4 * found.block)  # each rank has the queries of 2 sequences
    assert found.block == pytest.approx(2 * 64 / 4 * row / 1e9)
    assert (found.sent, found.exchanged) == (pytest.approx(120e-6, rel=1e-3), pytest.approx(80e-6, rel=1e-3))
    assert found.attention == pytest.approx(3 * 40e-6 + found.block + 80e-6 + 8e-6, rel=1e-3)
    two = replace(CLUSTER, inside=IntraNode(GB_s=1e6, latency_us=1), nics=Nics(per_node=4, GB_s=1e6, latency_us=10))
    steps = [
        decode_step(MODEL, TrainConfig(seq_length=1, tensor_model_parallel_size=size), two, 0).step for size in (4, 8)
    ]
    assert steps[1] - steps[0] == pytest.approx(LAYERS * 2 * 2 * 10e-6, rel=0.02)  # up and down, twice a layer
