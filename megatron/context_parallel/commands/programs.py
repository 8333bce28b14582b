"""The console scripts. A command is imported when its program runs, so that a missing extra is a one-line error."""

from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

from megatron.context_parallel.cli.run_main import run_main


def _program(name: str) -> Callable[[], NoReturn]:
    return lambda: run_main(lambda: import_module(f"{__package__}.{name}").main())


calibrate = _program("calibrate")
checkpoint = _program("checkpoint")
cluster_probe = _program("cluster_probe")
convert_hf = _program("convert_hf")
generate = _program("generate")
gpu_check = _program("gpu_check")
plan = _program("plan")
plan_search = _program("plan_search")
plot_loss = _program("plot_loss")
preprocess_data = _program("preprocess_data")
pretrain = _program("pretrain")
run_text_generation_server = _program("run_text_generation_server")
stuck = _program("stuck")
torchrun = _program("torchrun")
