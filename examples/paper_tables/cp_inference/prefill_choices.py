"""The rules of the paper, and ours, for pass-KV or pass-Q, against Table 4 of the paper.

    python -m examples.paper_tables.cp_inference.prefill_choices

Yang et al., Context Parallelism for Scalable Million-Token Inference (2024): Llama 3 405B, 4 nodes, T + P = 128,000.
"""

from rich.table import Table

from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.inference.choose import (
    EMPIRICAL,
    PASS_KV,
    PASS_Q,
    LayerShape,
    MeasuredPrefill,
    Rates,
    choose_prefill,
    empirical,
    fit_empirical,
)

from ..cells import read_cells

CONTEXT, RANKS = 128_000, 4
LLAMA_405B = LayerShape(128, 8, 128, 128, 2)
# Table 5: achieved rates of a rank of 8 GPUs, from 627 us for keys and values and 1608 us for a block.
RATES = Rates(compute=8 * 510e12, bandwidth=8 * 26.1e9)


def measured() -> dict[int, tuple[float, float]]:
    """The paper's milliseconds of pass-KV and pass-Q, by T."""
    of_variant: dict[str, dict[int, float]] = {"pass-KV": {}, "pass-Q": {}}
    for cell in read_cells("cp_inference", "table_4"):
        new = int(cell.row.split()[-1])  # of "P 126720 T 1280"
        of_variant[cell.column][new] = float(cell.paper)
    return {new: (kv, of_variant["pass-Q"][new]) for new, kv in of_variant["pass-KV"].items()}


TABLE_4 = measured()


def fitted() -> tuple[float, float, float]:
    """Constants of Appendix D that fit the logarithm of pass-Q's time over pass-KV's best: least squares."""
    return fit_empirical([MeasuredPrefill(new, CONTEXT - new, kv, q) for new, (kv, q) in TABLE_4.items()])


def choices(how: str) -> dict[int, str]:
    """The choice of a rule in each row; "printed" and "fitted" are constants of `empirical`."""
    if how in ("printed", "fitted"):
        constants = EMPIRICAL if how == "printed" else fitted()
        return {new: empirical(new, CONTEXT - new, constants) for new in TABLE_4}
    return {new: choose_prefill(how, new, CONTEXT - new, RANKS, LLAMA_405B, RATES) for new in TABLE_4}


def lost(how: str) -> dict[int, float]:
    """The rows in which a rule chooses the slower variant, and how much longer that takes."""
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
