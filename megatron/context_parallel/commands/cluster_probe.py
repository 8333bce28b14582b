"""Measures the cluster that it runs on, and writes a description for `--cluster` and `--cp-cluster`.

Run it where you will train, with one process per rank and the heads of one tensor-parallel rank.
"""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.cluster_probe()

import os
from dataclasses import replace
from pathlib import Path

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.cli.run_main import announce
from megatron.context_parallel.errors import UsageError

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class ProbeFlags(FlagSection):
    num_attention_heads: int = flag("number of query heads", 8)
    num_query_groups: int = flag("number of key/value heads", derived="as query heads", divides="num_attention_heads")
    kv_channels: int = flag("width of a head", 128)
    dtype: str = flag("dtype of the model", "bf16", choices=(*DTYPES,))
    quick: bool = flag("measure less, in some seconds instead of a minute", False)
    output: Path = flag("YAML file to write", endings=(".yaml", ".yml"))


PARSER = FlagParser(
    ProbeFlags,
    __doc__,
    "--output FILE [flags]",
    ["--num-attention-heads 32 --num-query-groups 8 --output cluster.yaml", "--quick --output cluster.yaml"],
    torchrun=True,
)


def read_flags(argv: list[str] | None = None) -> ProbeFlags:
    """The complete flags. Raises UsageError for invalid ones."""
    args = PARSER.parse(argv)
    if "RANK" not in os.environ:
        raise UsageError("no ranks: start it with torchrun --nproc-per-node 2, or one rank per device of a node")
    return replace(args, num_query_groups=args.num_query_groups or args.num_attention_heads)


def main(argv: list[str] | None = None) -> None:
    args = read_flags(argv)
    announce(f"measuring devices and links, which takes {'seconds' if args.quick else 'about a minute'}")
    import torch
    import torch.distributed as dist

    from megatron.context_parallel.cluster.description import save_cluster
    from megatron.context_parallel.cluster.measure.probe import probe

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        cluster = probe(
            device=device,
            dtype=getattr(torch, DTYPES[args.dtype]),
            heads=args.num_attention_heads,
            kv_heads=args.num_query_groups,
            head_dim=args.kv_channels,
            quick=args.quick,
        )
        if dist.get_rank() == 0:
            save_cluster(cluster, args.output)
            print(f"{args.output.read_text()}\nwrote {args.output}")
        dist.barrier()
    finally:
        dist.destroy_process_group()
