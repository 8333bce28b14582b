"""Random models trained in random parallel layouts: losses and gradient norms are those of one rank.

    python -m tests.campaigns.random_trainings --seconds 60 --seed 1

A case is a command line: a model, documents, a parallel layout, a strategy, and what is recomputed, sharded and moved.
Three steps on 2 to 4 ranks are compared with the same model and data on one rank, from the same weights. What a command
line cannot combine is refused in one line. Each failure prints the number that runs it again (`--only`). The exit
status is 1 if there is one, or if most cases were refused.
"""

import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from tests.support import flags_case
from tests.support.data_case import corpus
from tests.support.numbered_cases import numbered, read_flags
from tests.support.ranks import Ranks
from tests.support.training_case import Recorder

RANKS = 4
SEQUENCE = 48  # tokens: 2, 3 and 4 ranks can share them
CLOSE = {"losses": 5e-6, "gradient norms": 5e-5}  # relative
DATA = f"""
    --seq-length {SEQUENCE} --transformer-impl local --tokenizer-type ByteLevelTokenizer
    --make-vocab-size-divisible-by 1 --init-method-std 0.1 --global-batch-size 8 --train-iters 3 --eval-iters 0
    --split 100,0,0 --num-workers 0 --lr 1e-2
"""
STRATEGIES = (
    "ring",
    "ring:layout=contiguous",
    "ring:layout=cyclic",
    "allgather",
    "allgather:layout=zigzag",
    "direct",
    "attention2d",
    "lightseq",
    "mesh",
    "ulysses",
    "usp:head_parallel_size=2",
    "loongtrain:head_parallel_size=2",
    "mesh:head_parallel_size=2",
    "lightseq+ring:layout=contiguous",
    "ring+allgather:layout=zigzag",
    "ring*1,allgather:layout=zigzag*1",
    "ulysses:layout=zigzag,head_rounds=2",
)


@dataclass
class Case:
    """A run.

    Attributes:
        ranks: how many there are.
        model: flags of the model and its data, for one rank too; layout: the others.
    """

    ranks: int
    model: str
    layout: str


def draw(random: Random) -> Case:
    tensor, pipeline, context, data = random.choice(
        ((1, 1, 2, 1), (1, 1, 4, 1), (1, 1, 4, 1), (1, 1, 3, 1), (1, 1, 2, 2), (2, 1, 2, 1), (1, 2, 2, 1))
    )
    experts = random.random() < 0.2
    model = _model(random, experts, not (experts and tensor > 1)) + _documents(random)
    model += f" --micro-batch-size {random.choice((1, 2))}"  # over whose tokens experts are balanced
    layout = [f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"]
    layout += [f"--context-parallel-size {context} --cp-strategy {random.choice(STRATEGIES)}"]
    if tensor > 1 and (experts or random.random() < 0.5):
        layout.append("--sequence-parallel")
    if pipeline > 1 and random.random() < 0.3:
        layout.append("--num-layers-per-virtual-pipeline-stage 1")
    if "--reset-attention-mask" in model:
        layout.append(random.choice(("", "", "--cp-place-documents", "--dynamic-context-parallel")))
    if experts and tensor == 1 and random.random() < 0.5:
        layout.append("--expert-model-parallel-size 2")
    layout += [_recomputation(random, experts), _sharding(random, tensor * pipeline == 1)]
    return Case(tensor * pipeline * context * data, " ".join(model.split()), " ".join(" ".join(layout).split()))


def _model(random: Random, experts: bool, biased: bool) -> str:
    heads = random.choice((4, 4, 8))
    layers = 2 if experts else random.choice((2, 2, 4))  # megatron-core's log of experts keeps its first size
    flags = [f"--num-layers {layers} --hidden-size 32 --num-attention-heads {heads}"]
    flags += [
        f"--ffn-hidden-size 48 --kv-channels {random.choice((64, 80) if torch.cuda.is_available() else (8, 8, 12))}"
    ]
    flags += [f"--group-query-attention --num-query-groups {random.choice((2, 4))}"]
    flags += [random.choice(("--normalization RMSNorm", "--normalization LayerNorm"))]
    flags += [random.choice(("--swiglu", "--fast-geglu", "", _quick(random)))]
    plain = "--disable-bias-linear"
    flags += [random.choice((plain, f"{plain} --add-qkv-bias", "" if biased else plain))]
    flags += [random.choice(("", "--softmax-type learnable", "--softmax-type off-by-one"))]
    for some in ("--qk-layernorm", "--apply-layernorm-1p", "--sandwich-norm", "--scale-embeddings"):
        flags += [some * (random.random() < 0.2)]
    flags += ["--untie-embeddings-and-output-weights" * (random.random() < 0.5)]
    flags += ["--softmax-scale 0.2" * (random.random() < 0.2)]
    windowed = random.random() < 0.4
    if windowed:
        flags += [f"--window-size {random.choice((0, 3, 20))},0"]
        flags += [random.choice(("", "--window-attn-skip-freq 2"))]
    flags += [_positions(random, windowed)]
    if experts:
        flags += ["--num-experts 4 --moe-ffn-hidden-size 24", random.choice(("", "--moe-router-pre-softmax"))]
        flags += [random.choice(("", "--moe-aux-loss-coeff 0.01"))]
        flags += [random.choice(("--moe-token-dispatcher-type alltoall", ""))]
        flags += [random.choice(("", "--disable-bias-linear --moe-shared-expert-intermediate-size 24"))]
    return " ".join(flags)


def _quick(random: Random) -> str:
    return "--quick-geglu" + random.choice(("", " --glu-linear-offset 1 --activation-func-clamp-value 1"))


def _positions(random: Random, windowed: bool) -> str:
    kind = random.choice(("rope", "rope", "learned_absolute", "yarn"))
    flags = [f"--position-embedding-type {kind}"]
    if kind == "yarn":
        flags += ["--rotary-scaling-factor 4 --yarn-original-max-position-embeddings 32"]
    if kind == "rope":
        flags += [random.choice(("", "--use-rope-scaling", "--rotary-seq-len-interpolation-factor 4"))]
        flags += ["--rotary-base-of-windows 50" * (windowed and random.random() < 0.4)]
    if kind == "rope":
        flags += [random.choice(("", "", "--rotary-percent 0.5"))]
    return " ".join(flags)


def _documents(random: Random) -> str:
    flags = random.choice(("", "", "--reset-attention-mask", "--reset-attention-mask --reset-position-ids"))
    flags += random.choice(("", "", " --eod-mask-loss", " --pack-documents"))
    return " " + flags


def _recomputation(random: Random, experts: bool) -> str:
    full = "--recompute-granularity full --recompute-method"
    kept = "--recompute-whitelist core_attention"
    return random.choice(
        (
            "",
            "",
            f"{full} uniform --recompute-num-layers 1",
            f"{full} uniform --recompute-num-layers 2 --offload-checkpoints",
            f"{full} block --recompute-num-layers 1 {kept}",
            f"{full} uniform --recompute-num-layers 1 {kept} qkv proj fc1 fc2 norms --offload-kept",
            f"{full} uniform --recompute-num-layers 1 {kept} norms",
            "--recompute-activations",
            f"--recompute-granularity selective --recompute-modules core_attn {'moe' if experts else 'mlp'}",
            "--cross-entropy-chunk-size 6" + " --mlp-chunks-for-training 3" * (not experts),
        )
    )


def _sharding(random: Random, fsdp: bool) -> str:
    optimizer = "--use-distributed-optimizer"
    sharded = "--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"
    of_fsdp = ("--use-torch-fsdp2", sharded)
    return random.choice(
        (
            "",
            optimizer,
            f"{optimizer} --overlap-grad-reduce",
            f"{optimizer} --overlap-grad-reduce --overlap-param-gather",
            f"{optimizer} --num-distributed-optimizer-instances 2",
            *(of_fsdp if fsdp else ()),
        )
    )


def check(ranks: Ranks, case: Case, data: str) -> str:
    """What is wrong, or nothing; "refused: ..." for a command line that is refused.

    Args:
        data: the prefix of a corpus.
    """
    model = f"{DATA} {case.model}"
    with tempfile.TemporaryDirectory() as folder:
        start = f"--data-path {data} --load {folder}/start --finetune"
        try:
            ranks(1, flags_case.save_start, start, model)
            one = ranks(1, flags_case.train, start, "", model)[0]
            runs = ranks(case.ranks, flags_case.train, start, case.layout, model)
        except AssertionError as error:
            refused = re.search("UsageError: (.*)", str(error))
            return f"refused: {refused[1]}" if refused else str(error)
    return next(filter(None, (_difference(run, one) for run in runs)), "")


def _difference(run: Recorder, one: Recorder) -> str:
    """How a rank's numbers differ from those of one rank, or nothing."""
    pairs = {"losses": (run.losses, one.losses), "gradient norms": (run.grad_norms, one.grad_norms)}
    for what, (got, wanted) in pairs.items():
        off = [abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True)]
        if not all(share <= CLOSE[what] for share in off):
            return f"{what} differ by {off}: {got}, not {wanted}"
    return ""


def main() -> int:
    args = read_flags(__doc__.splitlines()[0], "run")
    ranks, counts, refusals = Ranks(RANKS), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(Path(folder))
        for again, random in numbered(args):
            case = draw(random)
            wrong = check(ranks, case, data)
            counts["runs"] += 1
            if wrong.startswith("refused: "):
                refusals[wrong] += 1
            elif wrong:
                counts["failed"] += 1
                print(f"{again}: {wrong}: {case}", flush=True)
    ranks.close()
    for why, count in refusals.most_common():
        print(f"{count} {why}")
    print(f"{counts['runs']} runs, {refusals.total()} refused, {counts['failed']} failed")
    return int(counts["failed"] > 0 or 2 * refusals.total() > counts["runs"])


if __name__ == "__main__":
    sys.exit(main())
