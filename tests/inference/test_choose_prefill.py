"""pass-KV or pass-Q: the paper's formulas against its tables, and ours against measured times."""

import math

import pytest

from examples.paper_tables.cp_inference.prefill_choices import LLAMA_405B, RATES, TABLE_4, lost
from megatron.context_parallel import UsageError
from megatron.context_parallel.cluster.description import AttentionRate, Cluster, Device, IntraNode, Nics
from megatron.context_parallel.commands import calibrate, generate, run_text_generation_server
from megatron.context_parallel.inference.choose import (
    PASS_KV,
    PASS_Q,
    LayerShape,
    MeasuredPrefill,
    Rates,
    algorithm_1,
    algorithm_5,
    choose_prefill,
    empirical,
    empirical_loss,
    seconds,
    sent_bytes,
)


def test_the_rules_against_table_4():
    """Algorithm 5: 12 of 14 rows; the two others cost 1.5% and 0.3%."""
    assert sorted(lost("alg5").values()) == pytest.approx([0.0027, 0.0147], abs=2e-4)
    assert len(lost("alg1")) == 1 and len(lost("printed")) == 10 and not lost("fitted")


def test_equation_2_gives_the_tie_that_was_measured():
    """T* = N C N_KV e / (2 N_H BW) is about 5000, where the ratio of both times is about 1."""
    tie = min(new for new in range(1, 20000) if algorithm_1(new, 10**9, 4, LLAMA_405B, RATES) == PASS_KV)
    assert tie == math.ceil(4 * RATES.compute * 8 * 2 / (2 * 128 * RATES.bandwidth)) == 4886


def test_algorithm_1_by_hand():
    slow = Rates(compute=1e15, bandwidth=1e9)  # nothing is hidden: the miss rate decides, at 2 x 8 / 128
    assert [algorithm_1(new, 8000 - new, 4, LLAMA_405B, slow) for new in (999, 1000)] == [PASS_Q, PASS_KV]
    # Eq. 5 takes 4 T BW / (N C e) off: 4 x 999 x 1e9 / (4 x 1e15 x 2) = 5e-4, so 12.45% is enough.
    assert [algorithm_5(new, 8000 - new, 4, LLAMA_405B, slow) for new in (995, 999)] == [PASS_Q, PASS_KV]


def test_the_printed_constants_contradict_table_4():
    assert {empirical(new, 128000 - new) for new in TABLE_4} == {PASS_Q}
    assert empirical(1000, 0, (1.0, 0.0, -6.9)) == PASS_KV and empirical(1000, 0, (1.0, 0.0, -7.0)) == PASS_Q
    assert choose_prefill("empirical", 1000, 3000, 4, LLAMA_405B, constants=(0.0, 1.0, 1.38)) == PASS_Q
    assert choose_prefill("empirical", 1000, 3000, 4, LLAMA_405B, constants=(0.0, 1.0, 1.39)) == PASS_KV


PASSES = "ranks,batch,new,cached,choice,milliseconds\n"


def test_constants_are_fitted_to_measured_passes(tmp_path, capsys):
    """Times that follow the formula give its constants back, through the file of benchmarks/inference.py."""
    path, true = tmp_path / "passes.csv", (0.1, 0.5, 0.3)
    lines = ["4,1,100,0,auto,3", "4,1,1,100,decode,2"]
    for batch, new, cached in ((1, 100, 900), (2, 200, 1800), (1, 50, 4000), (1, 1000, 0)):
        h = true[0] * math.log(batch * new) + true[1] * math.log(new / (new + cached)) + true[2]
        lines += [f"4,{batch},{new},{cached},pass-kv,7", f"4,{batch},{new},{cached},pass-q,{7 * math.exp(h)}"]
    path.write_text(PASSES + "\n".join(lines))
    calibrate.main(["--prefill-times", str(path)])
    report, flags = capsys.readouterr().out.splitlines()
    assert report == "4 of 4 prefills take the faster variant; the others cost 0.0% at most"
    assert [float(word) for word in flags.split()[-3:]] == pytest.approx(true, rel=1e-4)
    same = [f"4,1,{new},{1000 - new},{choice},{new}" for new in (9, 99, 999) for choice in ("pass-kv", "pass-q")]
    path.write_text(PASSES + "\n".join(same))
    calibrate.main(["--prefill-times", str(path)])
    assert capsys.readouterr().out.splitlines()[1].startswith("all have 1000 tokens, new and cached: the constants")
    slow = MeasuredPrefill(1000, 0, pass_kv=5.0, pass_q=4.0)
    assert empirical_loss(slow, (0.0, 0.0, 1.0)) == 0.25 and empirical_loss(slow, (0.0, 0.0, -1.0)) == 0
    for text, said in (
        (PASSES + "\n".join(lines[:6]), "2 prefills do not determine three constants"),
        (PASSES + "2,1,9,9,pass-kv,1\n4,1,9,9,pass-q,1", "has passes of 2, 4 ranks"),
        ("ranks\n4", "cannot be read .KeyError"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            calibrate.main(["--prefill-times", str(path)])


# 10 Mbit/s, 4 ranks, T + P = 4096, 16 heads, 1 KV head, d = 64, fp32: milliseconds of ring and attention2d 1x4.
SIZES, LINK = LayerShape(16, 1, 64, 64, 4), Rates(compute=20e9, bandwidth=10e6 / 8)
MEASURED = {0.01: (1272, 224), 0.025: (1303, 530), 0.05: (1275, 1022), 0.1: (1284, 2057), 0.2: (1316, 4215)}


def test_predicted_seconds_of_slow_links():
    for share, measured in MEASURED.items():
        new = round(4096 * share)
        ours = [1000 * seconds(variant, new, 4096 - new, 4, SIZES, LINK) for variant in (PASS_KV, PASS_Q)]
        assert ours == pytest.approx(measured, rel=0.11)
        best = PASS_KV if measured[0] < measured[1] else PASS_Q
        assert choose_prefill("auto", new, 4096 - new, 4, SIZES, LINK) == best
        assert choose_prefill("auto", new, 4096 - new, 4, SIZES) == best  # without rates: fewer bytes


def test_blocks_hide_messages():
    """A block of 2 x rows x keys x 2 head_dims takes 1 s here, each hop half of that; the last partial is bare."""
    sizes = LayerShape(1, 1, 1, 1, 4)
    pairs = 50 * (800 + 200 / 2) / 4
    rates = Rates(compute=4 * pairs, bandwidth=2 * 50 * 8.0)  # 50 partial rows of 8 bytes take half a second
    assert seconds(PASS_Q, 200, 800, 4, sizes, rates) == pytest.approx(4 + 0.5)
    assert seconds(PASS_KV, 200, 800, 4, sizes, Rates(4 * pairs, 250 * 8 / 0.5)) == pytest.approx(4)
    assert seconds(PASS_KV, 200, 800, 4, sizes, Rates(4 * pairs, 250 * 8 / 3)) == pytest.approx(3 * 3 + 1)
    assert seconds(PASS_KV, 200, 800, 4, sizes, Rates(math.inf, math.inf, 0.25)) == pytest.approx(0.75)
    assert seconds(PASS_Q, 200, 800, 1, sizes, rates) == pytest.approx(16 * 1, rel=1)


def test_bytes():
    assert sent_bytes(PASS_KV, 100, 300, 4, SIZES) == 3 * 100 * 2 * 64 * 4
    assert sent_bytes(PASS_Q, 100, 300, 4, SIZES) == 3 * 25 * 16 * (64 + 65) * 4
    assert LayerShape(4, 2, 8, 6, 2).partial_bytes == 4 * 7 * 4


def cluster(**inside) -> Cluster:
    kinds = ((1024, "bf16", 1.0), (4096, "bf16", 4.0), (4096, "fp32", 0.5))
    rates = tuple(AttentionRate(rows=r, dtype=t, forward_TFLOP_s=x, backward_TFLOP_s=1.0) for r, t, x in kinds)
    device = Device(name="d", peak_TFLOP_s=10.0, memory_GiB=1.0, memory_GB_s=1.0, attention=rates)
    nics = Nics(per_node=1, GB_s=0.5, latency_us=1000.0)
    return Cluster(
        name="c", source="s", nodes=4, devices_per_node=2, device=device,
        inside=IntraNode(GB_s=4.0, latency_us=1.0, **inside), nics=nics,
    )  # fmt: skip


def test_rates_of_a_cluster():
    """Between nodes the NIC is the slowest; inside one, a shared link carries what both devices send."""
    device = cluster().device
    assert Rates.of(cluster(), 8) == Rates(4e12, 0.5e9, 1e-3, device)
    assert Rates.of(cluster(), 2) == Rates(4e12, 4e9, 1e-6, device)
    assert Rates.of(cluster(shared=True), 2) == Rates(4e12, 2e9, 1e-6, device)
    assert Rates.of(cluster(), 1) == Rates(4e12, math.inf, 0.0, device)
    for n in (2, 4):  # tensor-parallel ranks fill the nodes, and both of a node send to the next one
        assert Rates.of(cluster(), n, tensor=2) == Rates(4e12, 0.25e9, 1e-3, device)
    assert Rates.of(cluster(), 1, "fp32").compute == 5e11


def test_what_is_refused():
    with pytest.raises(UsageError, match="--cp-prefill best: unknown; choose one of pass-kv, pass-q, "):
        choose_prefill("best", 1, 1, 4, SIZES)
    for how in ("alg1", "alg5"):
        with pytest.raises(UsageError, match=f"--cp-prefill {how}: needs the rates of a cluster; give --cluster"):
            choose_prefill(how, 1, 1, 4, SIZES)
    assert [choose_prefill(how, 9, 1, 4, SIZES) for how in (PASS_KV, PASS_Q)] == [PASS_KV, PASS_Q]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("alg1", "--cp-prefill alg1: needs the rates of a cluster; give --cluster dgx-h100"),
        ("alg5", "--cp-prefill alg5: needs the rates of a cluster"),
        ("alg1 --cluster nowhere.yaml", "nowhere.yaml"),
        ("empirical", "--cp-prefill empirical: needs constants .* give --cp-prefill-constants ALPHA BETA GAMMA"),
        ("empirical --cp-prefill-constants 1 2", "--cp-prefill-constants 1 2: give three numbers"),
        ("auto --cp-prefill-constants 1 2 3", "needs --cp-prefill empirical"),
    ],
)
def test_mistakes_are_told_before_ranks_meet(given, says):
    flags = ["--load", "x", "--cp-prefill", *given.split()]
    with pytest.raises(UsageError, match=says):
        generate.read_flags([*flags, "--prompt", "a"])
    with pytest.raises(UsageError, match=says):
        run_text_generation_server.main(flags)


def test_what_is_complete_is_accepted():
    flags = ["--load", "x", "--prompt", "a", "--cp-prefill", "empirical", "--cp-prefill-constants", "1", "-0.5", "2"]
    assert generate.read_flags(flags).cp_prefill_constants == [1.0, -0.5, 2.0]
    generate.read_flags(["--load", "x", "--prompt", "a", "--cp-prefill", "alg5", "--cluster", "dgx-h100"])
