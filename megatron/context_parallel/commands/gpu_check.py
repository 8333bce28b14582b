"""Checks the GPU path on one GPU, in stages, the most useful first; also NCCL and Transformer Engine, if available.

Each row is written to the file at once. The same command again runs the stages that are not in the file yet. The
exit status is 1 if an error exceeds its bound or a target is missed. FLOPs count the visible pairs of a mask (the
causal half): 4 x pairs x heads x head_dim forward, 2.5 times that backward.
"""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.gpu_check()

import gc
import json
import time
import traceback
from pathlib import Path

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.names import BACKENDS

from .gpu_checks.bars import SECONDS, STAGES, judge_end


class CheckFlags(FlagSection):
    stage: list[str] | None = flag("stages to run, also if they are in the file", derived="all others", choices=STAGES)
    output: Path = flag("file to write: a line of JSON for each row", Path("gpu_check.jsonl"))
    seconds: int | None = flag(
        "time for all: a stage that would not end in it, as estimated, is left out", derived="no limit"
    )
    plan: bool = flag("only print the stages and their estimated seconds; needs no GPU", False)


PARSER = FlagParser(
    CheckFlags, __doc__, "[flags]", ["", "--plan", "--seconds 540", "--stage blocks speed --output blocks.jsonl"]
)


def main(argv: list[str] | None = None) -> int:
    args, begun = PARSER.parse(argv), time.monotonic()
    finished = finished_stages(args.output)
    stages = args.stage or [stage for stage in STAGES if stage not in finished]
    if args.plan:
        print_plan(stages, args.seconds)
        return 0
    # These take seconds to import. `--help` and mistakes in flags are reported before.
    import torch

    from .gpu_checks.common import CheckReport, CheckSizes, print_table, said, still_works
    from .gpu_checks.memory import GpuMeter
    from .gpu_checks.speed import GpuClock
    from .gpu_checks.stages import Host, run_stage, setup

    if not torch.cuda.is_available():
        raise UsageError("needs a CUDA GPU, and this host has none; run it on a host with one")
    device = torch.device("cuda", torch.cuda.current_device())
    host = Host(device, torch.cuda.device_count(), GpuClock(), GpuMeter())
    report, bars, left_out = CheckReport(args.output), list[dict](), list[str]()
    report.write(setup=setup(device))
    for stage in stages:
        if args.seconds and time.monotonic() - begun + SECONDS[stage] > args.seconds:
            left_out.append(stage)
            continue
        shown, start = set(report.numbers), time.monotonic()
        gc.collect()
        torch.cuda.empty_cache()  # processes of this stage may need what those before have freed
        try:
            reached = run_stage(stage, report, list(BACKENDS[1:]), CheckSizes(), host)
        except Exception as error:  # the other stages run all the same; without its line in the file, it runs again
            traceback.print_exc()
            reached = judge_end(stage, said(error))
            report.write(failed=stage, wrong=said(error))
        else:
            report.write(stage=stage, seconds=round(time.monotonic() - start, 1), bars=reached)
        bars += reached
        for title, rows in report.numbers.items():
            if rows and title not in shown:
                print_table(title, rows)
        print(f"\n{stage}: {time.monotonic() - start:.0f} s; wrote {args.output}", flush=True)
        if not still_works(device):
            report.write(stage=stage, bars=reached)  # the next process goes on behind it
            print(f"After an error in {stage} the GPU does no work for this process. The same command does the rest.")
            left_out += stages[stages.index(stage) + 1 :]
            break
    if bars:
        print_table("bars", bars)
    if left_out:
        print(f"\nnot run: {', '.join(left_out)}")
    return int(any(bar["verdict"] == "FAIL" for bar in bars))


def finished_stages(path: Path) -> list[str]:
    """The stages that a file of an earlier run has whole.

    Raises:
        UsageError: it is not such a file.
    """
    if not path.is_file():
        return []
    finished = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            finished.append(json.loads(line).get("stage", ""))
        except (AttributeError, json.JSONDecodeError):
            raise UsageError(f"--output {path}: line {number} is not of an earlier check; give another file") from None
    return [stage for stage in finished if stage]


def print_plan(stages: list[str], limit: int | None) -> None:
    """Prints the stages that are to run, and those that are left out because the estimates exceed the limit."""
    left_out: list[str] = []
    estimated = 0
    for stage in stages:
        if limit is not None and estimated + SECONDS[stage] > limit:
            left_out.append(stage)
            continue
        estimated += SECONDS[stage]
        print(f"{stage:12} about {SECONDS[stage]} s")
    print(f"together about {estimated} s; not now: {', '.join(left_out) or 'none'}")
