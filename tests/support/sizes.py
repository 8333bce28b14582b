"""Numbers of ranks for tests that look at the plans of many."""

SIZES = (
    *range(1, 17),
    24,
    29,
    36,
    48,
    64,
)  # every small one, some large ones, the largest promised
