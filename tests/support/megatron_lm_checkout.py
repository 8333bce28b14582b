"""Runs a checkout's own pretrain_gpt.py on a host without a GPU, with this project's attention or Megatron's.

    torchrun --nproc-per-node N tests/support/megatron_lm_checkout.py CHECKOUT [--cp-strategy SPEC] [Megatron's flags]

Without `--cp-strategy` nothing of Megatron's attention is replaced. What stands in for CUDA is needed here only.
"""

import importlib.util
import json
import runpy
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --init-method-std 0.1 "
    "--seq-length 64 --max-position-embeddings 64 --transformer-impl local --use-cpu-initialization"
)
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 5 --lr 1e-2 --weight-decay 0.0 --clip-grad 1.0 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --calculate-per-token-loss --log-interval 1 --eval-iters 0 "
    "--eval-interval 100 --seed 7 --split 100,0,0 --num-workers 0"
)
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 127"
HOST = (
    "--distributed-backend gloo --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-create-attention-mask-in-dataloader"
)


def main(checkout: str, flags: list[str]) -> None:
    helpers = compiled_helpers()  # of the installed megatron-core: a checkout has its sources only
    sys.path.insert(0, checkout)
    sys.modules["megatron.core.datasets.helpers_cpp"] = helpers
    stand_in_for_cuda()
    script, run = f"{checkout}/pretrain_gpt.py", runpy.run_path

    def run_on_cpu(*args: Any, **kwargs: Any) -> None:
        prepare_training()
        run(*args, **kwargs)

    data = [] if "--data-path" in flags else DATA.split()
    flags = [*MODEL.split(), *TRAINING.split(), *HOST.split(), *data, *flags]
    from megatron.context_parallel.integration import megatron_lm
    from megatron.context_parallel.patches import cpu_host

    cpu_host.support_cpu_host()
    if "--cp-strategy" in flags:
        with mock.patch.object(runpy, "run_path", run_on_cpu):
            megatron_lm.main([script, *flags])
        return
    sys.argv = [script, *flags]
    run_on_cpu(script, run_name="__main__")


def read_lines(kind: str, data_files: str, split: str) -> list[dict]:
    """Stands in for `load_dataset` of the package datasets."""
    assert (kind, split) == ("json", "all")
    return [json.loads(line) for line in Path(data_files).read_text().splitlines()]


def compiled_helpers() -> ModuleType:
    (path,) = (
        found
        for folder in sys.path
        for found in Path(folder, "megatron", "core", "datasets").glob("helpers_cpp*.so")
        if found.exists()
    )
    spec = importlib.util.spec_from_file_location("megatron.core.datasets.helpers_cpp", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stand_in_for_cuda() -> None:
    class Stream:
        def wait_stream(self, other: object) -> None: ...

        def wait_event(self, other: object) -> None: ...

        def synchronize(self) -> None: ...

    cuda: Any = torch.cuda
    cuda.Stream, cuda.current_stream, cuda.stream = Stream, Stream, lambda stream: nullcontext()
    cuda.device_count, cuda.set_device = lambda: 1, lambda device: None  # without one, groups and seeds are left out
    cuda.get_device_properties = lambda *device: SimpleNamespace(major=9, minor=0, name="none", total_memory=1 << 34)
    cuda.get_device_capability = lambda *device: (9, 0)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *device: 0)
    sys.modules.setdefault("six", ModuleType("six"))


def prepare_training() -> None:
    """Patches the parts of megatron.training that need a GPU or a compiler."""
    from megatron.training import initialize, training

    initialize._compile_dependencies = lambda: None
    training.set_jit_fusion_options = initialize.set_jit_fusion_options = lambda **options: None
    training.initialize_megatron = partial(initialize.initialize_megatron, allow_no_cuda=True)
    sys.modules["datasets"] = datasets = ModuleType("datasets")
    datasets.load_dataset = read_lines  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
