"""Other projects' context parallelism behind one interface. None is a dependency: an adapter imports its library.

An adapter is a class `Adapter(problem, group, flash, **options)`. It has `order`, the order of dimensions in which the
library takes tensors ("bshd" or "sbhd"), `positions(length)`, the tokens of this rank (int64 [length / ranks]), and
`attend(q, k, v)`, the differentiable attention. For unsupported cases it raises an exception with the reason, in its
constructor or when it is checked. All of them use the kernel `flash`, a `cpu_flash.CpuFlash`, so that only the code
around it differs.
"""

PEERS = {  # name on the command line: (module here, what it is)
    "torch": ("torch_ring", "PyTorch's own ring attention; rotate=alltoall (default) or allgather"),
    "yunchang": ("yunchang", "USP; ulysses=DEGREE (default: as many heads as can be split), the rest is a ring"),
    "ring-flash-attn": ("ring_flash_attn", "ring attention of zhuzilin; variant=zigzag (default), stripe or basic"),
    "deepspeed": ("deepspeed", "DeepSpeed Ulysses"),
}
