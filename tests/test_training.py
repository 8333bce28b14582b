"""The loss of a training run does not depend on how it is spread over ranks."""

import functools

import pytest
import training_case

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
STEPS = 20

SPREADS = {
    "cp2": (2, {CP: 2}),
    "cp4": (4, {CP: 4}),
    "cp4 cyclic": (4, {CP: 4, "cp_layout": "cyclic"}),
    "cp4 contiguous": (4, {CP: 4, "cp_layout": "contiguous"}),
    "cp4 allgather": (4, {CP: 4, "cp_strategy": "allgather"}),
    "cp2 allgather cyclic": (2, {CP: 2, "cp_strategy": "allgather", "cp_layout": "cyclic"}),
    "cp2 tp2": (4, {CP: 2, TP: 2}),
    "cp2 tp2 sequence parallel": (4, {CP: 2, TP: 2, "sequence_parallel": True}),
    "cp2 pp2": (4, {CP: 2, PP: 2}),
    "cp2 pp2 interleaved": (4, {CP: 2, PP: 2, "virtual_pipeline_model_parallel_size": 2}),
    "cp2 dp2": (4, {CP: 2}),
    "cp2 dp2 replicated optimizer": (4, {CP: 2, "use_distributed_optimizer": False}),
    "cp2 dp2 overlapped": (4, {CP: 2, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "dp4": (4, {}),
    "cp2 recomputed": (
        2,
        {CP: 2, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
}


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    """Of a family: where its initial weights are, and how they train on one rank."""

    @functools.cache
    def run(family: str):
        start = str(tmp_path_factory.mktemp(family))
        ranks(1, training_case.save_initial, family, start)
        return start, ranks(1, train_from, start, family, {})[0]

    return run


def train_from(start: str, family: str, changes: dict) -> training_case.Recorder:
    evaluation = {"eval_iters": 1, "eval_interval": 10}
    return training_case.train(family, load=start, finetune=True, train_iters=STEPS, **evaluation, **changes)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("family", training_case.FAMILIES)
def test_every_step_has_the_loss_of_one_rank(ranks, reference, family, spread):
    start, one = reference(family)
    world, changes = SPREADS[spread]
    for run in ranks(world, train_from, start, family, changes):
        assert len(run.losses) == STEPS
        assert run.losses == pytest.approx(one.losses, rel=1e-5)
        assert run.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
        assert run.evaluations == pytest.approx(one.evaluations, rel=1e-5)


@pytest.mark.parametrize("family", training_case.FAMILIES)
def test_training_learns(reference, family):
    losses = reference(family)[1].losses
    assert sum(losses[-5:]) < 0.93 * sum(losses[:5])
