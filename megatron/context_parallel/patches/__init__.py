"""What reaches into other libraries: names of theirs that are replaced, and private names that are called.

In: functions of ours, groups, models. Out: those private functions under plain names, and libraries that call ours.
A file is one thing. It says what it reaches, why no public name does it, and in `CHECKED` with which releases.
With a new release of a library, look at the files whose `CHECKED` names it; `tests/patches` fails for what has changed.
`kernels/libraries` has files of its own for libraries of kernels. Start with `torch_process_groups.py`.
"""
