"""Measures the cluster that it runs on and writes its description, for `--cluster` and `--cp-cluster`.

Run it where you will train, one process per rank, with the heads of one tensor-parallel rank:

    torchrun --nproc-per-node 8 tools/cluster_probe.py --num-attention-heads 32 --num-query-groups 8 \\
        --kv-channels 128 --output cluster.yaml
"""

import argparse
import os
from pathlib import Path

from megatron.context_parallel.errors import UsageError

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--num-attention-heads", type=int, default=8, help="query heads; default: %(default)s")
    parser.add_argument("--num-query-groups", type=int, help="key/value heads; default: as query heads")
    parser.add_argument("--kv-channels", type=int, default=128, help="size of a head; default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the model; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="measure less: some seconds instead of a minute")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="YAML file to write")
    args = parser.parse_args(argv)
    args.num_query_groups = args.num_query_groups or args.num_attention_heads
    return args


def check(args: argparse.Namespace) -> None:
    """Raises UsageError for what argparse cannot see."""
    for name in ("num_attention_heads", "num_query_groups", "kv_channels"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: need at least 1")
    heads, kv_heads = args.num_attention_heads, args.num_query_groups
    if heads % kv_heads:
        raise UsageError(f"--num-query-groups {kv_heads}: must divide --num-attention-heads {heads}, as 1 does")
    if args.output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--output {args.output}: must end in .yaml, such as cluster.yaml")
    if not args.output.absolute().parent.is_dir():
        raise UsageError(f"--output {args.output}: no folder {args.output.parent}; make it first")
    if "RANK" not in os.environ:
        raise UsageError("no ranks: start it with torchrun --nproc-per-node 2, or as many as the devices of a node")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check(args)
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
