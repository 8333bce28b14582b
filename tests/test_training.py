"""The loss of a training run does not depend on how it is spread over ranks."""

import functools

import pytest
import training_case

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
STEPS = 20

INTERLEAVED = {CP: 2, PP: 2, "num_layers": 4, "virtual_pipeline_model_parallel_size": 2}
RECOMPUTED = {CP: 2, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

SPREADS = {  # name: families, ranks, arguments
    "cp2": ("llama gpt3", 2, {CP: 2}),
    "cp4": ("llama gpt3", 4, {CP: 4}),
    "cp4 cyclic": ("llama", 4, {CP: 4, "cp_layout": "cyclic"}),
    "cp4 contiguous": ("llama gpt3", 4, {CP: 4, "cp_layout": "contiguous"}),
    "cp4 allgather": ("llama gpt3", 4, {CP: 4, "cp_strategy": "allgather"}),
    "cp2 tp2": ("llama gpt3", 4, {CP: 2, TP: 2}),
    "cp2 tp2 sequence parallel": ("llama gpt3", 4, {CP: 2, TP: 2, "sequence_parallel": True}),
    "cp2 pp2": ("llama gpt3", 4, {CP: 2, PP: 2}),
    "cp2 pp2 interleaved": ("llama", 4, INTERLEAVED),
    "cp2 dp2": ("llama gpt3", 4, {CP: 2}),
    "cp2 dp2 replicated optimizer": ("llama", 4, {CP: 2, "use_distributed_optimizer": False}),
    "cp2 dp2 overlapped": ("llama", 4, {CP: 2, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "cp2 recomputed": ("llama", 2, RECOMPUTED),
}
CASES = [(family, name) for name, (families, *_) in SPREADS.items() for family in families.split()]


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    """Of a family and depth: where its initial weights are, and how they train on one rank."""

    @functools.cache
    def run(family: str, num_layers: int = 2):
        start = str(tmp_path_factory.mktemp(family))
        ranks(1, training_case.save_initial, family, start, {"num_layers": num_layers})
        return start, ranks(1, train_from, start, family, {"num_layers": num_layers})[0]

    return run


def train_from(start: str, family: str, changes: dict) -> training_case.Recorder:
    evaluation = {"eval_iters": 1, "eval_interval": 10}
    return training_case.train(family, load=start, finetune=True, train_iters=STEPS, **evaluation, **changes)


@pytest.mark.parametrize(("family", "spread"), CASES)
def test_every_step_has_the_loss_of_one_rank(ranks, reference, family, spread):
    _, world, changes = SPREADS[spread]
    start, one = reference(family, changes.get("num_layers", 2))
    for run in ranks(world, train_from, start, family, changes):
        assert len(run.losses) == STEPS
        assert run.losses == pytest.approx(one.losses, rel=1e-5)
        assert run.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
        assert run.evaluations == pytest.approx(one.evaluations, rel=1e-5)


@pytest.mark.parametrize("family", training_case.FAMILIES)
def test_training_learns(reference, family):
    losses = reference(family)[1].losses
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])


def test_batches_have_uneven_masks():
    # Otherwise a loss averaged rank by rank would pass the tests above.
    mask = training_case.sample(2)["loss_mask"]
    assert mask[:8].sum() == 0 < mask[8:].sum() < 24
