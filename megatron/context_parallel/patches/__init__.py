"""Access to other libraries' internals: names that are replaced, and private names that are called.

In: our functions, groups, models. Out: private functions under plain names, and libraries that call our functions.
Each file covers one subject. It says what it accesses, why no public name is enough, and in `CHECKED` with which
releases. For a new release of a library, check the files whose `CHECKED` names it; `tests/patches` fails for changes.
`kernels/libraries` has separate files for kernel libraries. Start with `torch_process_groups.py`.
"""


def release_of(version: str) -> tuple[int, int]:
    """The first two numbers of a version: (2, 13) for "2.13.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
