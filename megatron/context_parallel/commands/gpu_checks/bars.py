"""The stages of the check, the most useful first, their targets, and whether they were reached."""

BARS: dict[str, dict[str, tuple[str, float]]] = {
    "compile": {"kernels that do not compile": ("at most", 0)},
    "blocks": {"errors of blocks over their bound": ("at most", 0)},
    "nccl": {"errors of NCCL over their bound": ("at most", 0)},
    "strategies": {"errors of strategies over their bound": ("at most", 0)},
    "training": {"losses of training that differ from a CPU's": ("at most", 0)},
    "step": {"training steps that fail, or take 1% more memory than predicted": ("at most", 0)},
    "decode": {"errors of decode over their bound": ("at most", 0)},
    "speed": {
        "step / best library's causal, forward": ("at least", 0.70),
        "step / best library's causal, backward": ("at least", 0.60),
    },
    "executor": {
        "calls of a kernel per gathered block of attention2d": ("at most", 1),
        "executor: all but kernels / total": ("at most", 0.03),
        "results that differ in 5 repeats": ("at most", 0),
        "waits of the host for the GPU after the first run": ("at most", 0),
    },
    "longest": {"long training steps that fail, or take 1% more memory than predicted": ("at most", 0)},
    "memory": {"peak of a rank's share / formula": ("at most", 1)},
    "documents": {
        "documents, ms of a micro batch on the critical path": ("at most", 10),
        "documents, waits of the host for the GPU": ("at most", 0),
    },
    "tiles": {},
    "te": {"errors inside Transformer Engine over their bound": ("at most", 0)},
}
STAGES = tuple(BARS)
SECONDS = dict(  # on an H200 with 16 cores, estimated
    zip(STAGES, (100, 60, 25, 140, 75, 80, 120, 150, 60, 120, 80, 30, 120, 60), strict=True)
)


def judge(stage: str, *reached: float | None) -> list[dict]:
    """Whether each target of a stage was reached."""
    bars = []
    for (bar, (sense, limit)), value in zip(BARS[stage].items(), reached, strict=True):
        met = value is not None and (value <= limit if sense == "at most" else value >= limit)
        bars.append({"bar": bar, "limit": f"{sense} {limit}", "reached": value, "verdict": "PASS" if met else "FAIL"})
    return bars


def judge_end(stage: str, wrong: str) -> list[dict]:
    """The result of a stage that an error ended."""
    return [{"bar": f"{stage} runs to its end", "limit": "no error", "reached": wrong, "verdict": "FAIL"}]
