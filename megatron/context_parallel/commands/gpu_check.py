"""Checks the GPU path on one GPU, in stages; also NCCL and Transformer Engine, if available.

Each stage takes less than 8 minutes, all on one GPU less than 20. The JSON file is written after each stage. The exit
status is 1 if an error exceeds its bound or a target is missed. FLOPs count the visible pairs of a mask (the causal
half): 4 x pairs x heads x head_dim forward, 2.5 times that backward.
"""

import json
import time
from pathlib import Path

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.names import BACKENDS

from .gpu_checks.bars import STAGES


class CheckFlags(FlagSection):
    stage: list[str] | None = flag("stages to run", derived="all", choices=STAGES)
    output: Path = flag("JSON file to write", Path("gpu_check.json"))


PARSER = FlagParser(CheckFlags, __doc__, "[flags]", ["", "--stage errors speed --output errors.json"])


def main(argv: list[str] | None = None) -> int:
    args = PARSER.parse(argv)
    # These take seconds to import. `--help` and mistakes in flags are reported before.
    import torch

    from .gpu_checks.common import CheckReport, CheckSizes, print_table
    from .gpu_checks.memory import GpuMeter
    from .gpu_checks.speed import GpuClock
    from .gpu_checks.stages import Host, run_stage, setup

    if not torch.cuda.is_available():
        raise UsageError("needs a CUDA GPU, and this host has none; run it on a host with one")
    device = torch.device("cuda", torch.cuda.current_device())
    host = Host(device, torch.cuda.device_count(), GpuClock(), GpuMeter())
    report, bars, seconds = CheckReport(), list[dict](), dict[str, float]()
    for stage in args.stage or STAGES:
        shown, start = set(report.numbers), time.perf_counter()
        bars += run_stage(stage, report, list(BACKENDS[1:]), CheckSizes(), host)
        seconds[stage] = time.perf_counter() - start
        for title, rows in report.numbers.items():
            if rows and title not in shown:
                print_table(title, rows)
        content = {"setup": setup(device), "seconds": seconds, "bars": bars, "tables": report.numbers}
        args.output.write_text(json.dumps(content, indent=2) + "\n")
        print(f"\n{stage}: {seconds[stage]:.0f} s; wrote {args.output}", flush=True)
    if bars:
        print_table("bars", bars)
    return int(any(bar["verdict"] == "FAIL" for bar in bars))
