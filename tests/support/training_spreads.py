"""Parallel layouts of a training run, whose losses are those of one rank."""

import functools

import pytest

from tests.support import training_case

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
STEPS, EVALUATED = 3, 2  # of the layouts: training continues after an evaluation

INTERLEAVED = {CP: 2, PP: 2, "num_layers": 4, "virtual_pipeline_model_parallel_size": 2}
RECOMPUTED = {CP: 2, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
KEPT = {"recompute_whitelist": ["core_attention"]}
ALL_KEPT = {"recompute_whitelist": ["core_attention", "qkv", "proj", "fc1", "fc2", "norms"]}
OFFLOADED = {"offload_checkpoints": True, "offload_kept": True}
LOSS_IN_CHUNKS = {"cross_entropy_chunk_size": 6}  # divides no number of tokens here
MLP_IN_CHUNKS = {"mlp_chunks_for_training": 3}

CONTEXT_FIRST = {"head_parallel_size": 2, "placement": "context-first"}

SPREADS = {  # name: families that the tests train, ranks, arguments
    "cp2": ("", 2, {CP: 2}),
    "cp4": ("", 4, {CP: 4} | LOSS_IN_CHUNKS),
    "cp4 lightseq": ("llama", 4, {CP: 4, "cp_strategy": "lightseq", "cp_layout": "contiguous"}),
    "cp4 mesh": ("", 4, {CP: 4, "cp_strategy": "mesh", "cp_layout": "cyclic"}),
    "cp4 loongtrain": ("llama", 4, {CP: 4, "cp_strategy": "loongtrain", "cp_options": CONTEXT_FIRST}),
    "cp2 tp2": ("sinks", 4, {CP: 2, TP: 2} | LOSS_IN_CHUNKS),
    "cp2 tp2 sequence parallel": (
        "gpt3",
        4,
        LOSS_IN_CHUNKS | MLP_IN_CHUNKS | {CP: 2, TP: 2, "sequence_parallel": True},
    ),
    "cp2 pp2": ("", 4, {CP: 2, PP: 2} | LOSS_IN_CHUNKS),
    "cp2 pp2 interleaved": ("llama", 4, INTERLEAVED),
    "cp2 dp2": ("", 4, {CP: 2}),
    "cp2 dp2 replicated optimizer": ("llama", 4, {CP: 2, "use_distributed_optimizer": False}),
    "cp2 dp2 overlapped": (
        "llama",
        4,
        {CP: 2, "overlap_grad_reduce": True, "overlap_param_gather": True} | LOSS_IN_CHUNKS | MLP_IN_CHUNKS,
    ),
    "cp2 recomputed": ("", 2, RECOMPUTED | MLP_IN_CHUNKS),
    "cp2 outputs kept": ("", 2, RECOMPUTED | ALL_KEPT),
    "cp2 pp2 outputs kept": ("llama", 4, RECOMPUTED | ALL_KEPT | OFFLOADED | {PP: 2}),
    "cp4 heads, attention kept": (
        "sinks",
        4,
        RECOMPUTED | KEPT | OFFLOADED | {CP: 4, "cp_strategy": "usp", "cp_options": {"head_parallel_size": 2}},
    ),
}


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
    case = {"train_iters": STEPS, "eval_iters": 1, "eval_interval": EVALUATED, **changes}
    return training_case.train(family, load=start, finetune=True, **case)


def check_spread(ranks, reference, family: str, world: int, changes: dict) -> None:
    start, one = reference(family, changes.get("num_layers", 2))
    for run in ranks(world, train_from, start, family, changes):
        assert len(run.losses) == STEPS
        assert run.losses == pytest.approx(one.losses, rel=1e-6)
        assert run.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
        assert run.evaluations == pytest.approx(one.evaluations, rel=1e-6)
        assert len(run.evaluations) == 1
