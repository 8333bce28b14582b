"""The paper's rules for pass-KV or pass-Q, and ours, against its Table 4.

    PYTHONPATH=. python benchmarks/prefill_choices.py

Yang et al., Context Parallelism for Scalable Million-Token Inference (2024): Llama 3 405B, 4 nodes, T + P = 128,000.
"""

import math

import numpy
from rich.table import Table

from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.inference.choose import (
    EMPIRICAL,
    PASS_KV,
    PASS_Q,
    LayerShape,
    Rates,
    choose_prefill,
    empirical,
)

CONTEXT, RANKS = 128_000, 4
LLAMA_405B = LayerShape(128, 8, 128, 128, 2)
# Milliseconds of pass-KV and pass-Q by T.
TABLE_4 = {
    1280: (1023.39, 898.71),
    3200: (1110.18, 1046.43),
    4160: (1298.92, 1280.1),
    6400: (1305.56, 1302.01),
    12800: (2080.67, 2205.27),
    25600: (3353.02, 3617.02),
    38400: (4629.23, 4922.52),
    51200: (5745.08, 6217.83),
    64000: (6845.21, 7367.99),
    76800: (7890.35, 8468.66),
    89600: (8697.27, 9666.62),
    102400: (10105.78, 10652.39),
    115200: (11136.4, 11571.62),
    128000: (11462.15, 12360.57),
}
# Table 5: achieved rates of a rank of 8 GPUs, from 627 us for keys and values and 1608 us for a block.
RATES = Rates(compute=8 * 510e12, bandwidth=8 * 26.1e9)


def fitted() -> tuple[float, float, float]:
    """Constants of Appendix D that fit the logarithm of pass-Q's time over pass-KV's best: least squares."""
    known = [[math.log(new), math.log(new / CONTEXT), 1.0] for new in TABLE_4]
    wanted = [math.log(q / kv) for kv, q in TABLE_4.values()]
    a, b, c = numpy.linalg.lstsq(numpy.array(known), numpy.array(wanted), rcond=None)[0].tolist()
    return a, b, c


def choices(how: str) -> dict[int, str]:
    """What a rule takes in each row; "printed" and "fitted" are constants of `empirical`."""
    if how in ("printed", "fitted"):
        constants = EMPIRICAL if how == "printed" else fitted()
        return {new: empirical(new, CONTEXT - new, constants) for new in TABLE_4}
    return {new: choose_prefill(how, new, CONTEXT - new, RANKS, LLAMA_405B, RATES) for new in TABLE_4}


def lost(how: str) -> dict[int, float]:
    """The rows in which a rule takes the slower one, and how much longer that takes."""
    taken = choices(how)
    faster = {new: PASS_KV if kv < q else PASS_Q for new, (kv, q) in TABLE_4.items()}
    return {new: max(of) / min(of) - 1 for new, of in TABLE_4.items() if taken[new] != faster[new]}


def main() -> None:
    rules = ("alg1", "alg5", "printed", "fitted", "auto")
    table = Table("T", "miss rate", "pass-KV ms", "pass-Q ms", *rules, title="Table 4: what each rule takes")
    for new, (kv, q) in TABLE_4.items():
        row = [str(new), f"{new / CONTEXT:.2%}", f"{kv:.0f}", f"{q:.0f}"]
        table.add_row(*row, *(choices(rule)[new] for rule in rules))
    show(table)
    for rule in rules:
        wrong = lost(rule)
        right, cost = len(TABLE_4) - len(wrong), max(wrong.values(), default=0)
        print(f"{rule}: {right} of {len(TABLE_4)} rows; costs {cost:.1%} at most")
    print("fitted constants:", *(f"{x:.4f}" for x in fitted()))


if __name__ == "__main__":
    main()
