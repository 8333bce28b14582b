"""Random command lines: a model, its data and numbers, and the layouts in which parts of its training run.

`DATA` stands for the folder of the data (`write_data`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.support import chat_case
from tests.support.data_case import corpus, preprocess
from tests.support.device import HEAD_DIM, NO_POWER_OF_2

from .schedule import Schedule, draw_schedule

SEQUENCE = 48  # tokens: 2, 3 and 4 ranks can share them
SIZES = (  # tensor, pipeline, context, data
    *((1, 1, 2, 1), (1, 1, 4, 1), (1, 1, 4, 1), (1, 1, 3, 1), (1, 1, 2, 2), (2, 1, 2, 1), (1, 2, 2, 1)),
    *((1, 1, 1, 2), (1, 1, 1, 4), (2, 2, 1, 1), (1, 2, 1, 2), (2, 1, 1, 2), (1, 4, 1, 1), (4, 1, 1, 1), (1, 1, 1, 1)),
)
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
    "ring*1,allgather:layout=zigzag*LAYERS",
    "ulysses:layout=zigzag*1,direct:layout=zigzag*LAYERS",
    "ulysses:layout=zigzag,head_rounds=2",
)
TEMPLATE = chat_case.CHATML.replace("{{ message.role }}\n", "{{ message.role[0] }}").replace("assistant\n", "a")


@dataclass
class Part:
    """A part of a run: how many ranks it has, the flags of its layout, and the iteration after which it stops."""

    ranks: int
    flags: str
    stop: int | None = None


@dataclass
class Case:
    """A run.

    Attributes:
        model: flags of the model and its data, for one rank too.
        numbers: float32, bf16 or fp16.
        parts: each resumes where the one before stopped.
        evaluated: a layout in which the last checkpoint alone is evaluated, or None.
    """

    model: str
    numbers: str
    schedule: Schedule
    parts: list[Part]
    evaluated: Part | None


def write_data(folder: Path) -> None:
    """Writes documents, longer ones, and chats with their tokenizer."""
    corpus(folder)
    lines = [json.dumps({"text": f"{number:03d}\x02" * (2 + number % 23)}) for number in range(60)]
    (folder / "more.jsonl").write_text("\n".join(lines))
    preprocess(folder, "--input", folder / "more.jsonl", "--append-eod", prefix="more")
    chat_case.tokenizer(folder / "tokenizer", TEMPLATE)
    chats = []
    for number in range(60):
        words = ["ab"[: 1 + number % 2] * (1 + number % 5), "xyz"[: 1 + number % 3] * (1 + number % 7)]
        chats.append(chat_case.chat(*words * (1 + number % 2), system="s" if number % 4 == 0 else None))
    chat_case.write(folder / "chats.jsonl", chats)


def draw(random: Random) -> Case:
    numbers = random.choice(("float32", "float32", "float32", "bf16", "fp16"))
    micro = random.choice((1, 2))  # over whose tokens experts are balanced
    experts = random.random() < 0.25
    schedule = draw_schedule(random, 1e-2 if numbers == "float32" else 1e-3, 4 * micro)
    tensor_can_split_experts = not experts or random.random() < 0.5
    layers = 2 if experts else random.choice((2, 2, 4))  # megatron-core's log of experts keeps its first size
    model = [_model(random, experts, layers, experts and tensor_can_split_experts), _data(random, schedule)]
    model += [schedule.flags, _optimizer(random), f"--micro-batch-size {micro}"]
    if numbers != "float32":
        model.append(_scaling(random))
    model_flags = " ".join(" ".join(model).split())
    tensor = 1 if experts and not tensor_can_split_experts else 4
    parts = []
    for stop in random.choice(((None,), (None,), (2, None), (1, None), (1, 3, None))):
        parts.append(draw_part(random, model_flags, layers, tensor, stop, numbers))
        parts[-1].flags += random.choice(("", "", " --async-save", " --save-interval 1 --keep-last 1"))
    evaluated = None
    if schedule.evaluated and random.random() < 0.4:
        evaluated = draw_part(random, model_flags, layers, tensor, None, numbers)
    return Case(model_flags, numbers, schedule, parts, evaluated)


def draw_part(random: Random, model: str, layers: int, most_tensor: int, stop: int | None, numbers: str) -> Part:
    """A layout for a model of so many layers, on at most so many tensor-parallel ranks."""
    experts = "--num-experts" in model
    sizes = [size for size in SIZES if size[0] <= most_tensor and layers % size[1] == 0]
    tensor, pipeline, context, data = random.choice(sizes)
    flags = [f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"]
    flags += [f"--context-parallel-size {context}", _strategy(random, context, layers)]
    if tensor > 1 and (experts or random.random() < 0.5):
        flags.append("--sequence-parallel")
    if 1 < pipeline < layers and random.random() < 0.4:
        flags.append("--num-layers-per-virtual-pipeline-stage 1")
    if any(flag in model for flag in ("--reset-attention-mask", "--sft", "--pack-documents")):
        shared = "--dynamic-context-parallel" * (not experts or data == 1)  # else they are balanced over more sequences
        flags.append(random.choice(("", "", "--cp-place-documents", shared)))
    if experts and tensor == 1 and context * data % 2 == 0 and random.random() < 0.5:
        flags.append("--expert-model-parallel-size 2")
    if not experts and random.random() < 0.3:
        flags.append("--micro-batch-size 1")
    chunks = random.choice((0, 0, 5, 12))
    flags.append(f"--cross-entropy-chunk-size {chunks}" * (chunks > 0))
    flags.append(f"--make-vocab-size-divisible-by {random.choice((1, 1, 10, 128))}")
    if numbers != "float32" and random.random() < 0.2:
        flags.append("--cp-partials-in-16-bits")
    repeats = random.random() < 0.1  # a step that is not finite, which there is none of
    flags.append("--rerun-mode validate_results" * repeats)
    fsdp = tensor * pipeline == 1 and numbers != "fp16" and not repeats
    flags += [_recomputation(random, experts), _sharding(random, fsdp, context * data)]
    return Part(tensor * pipeline * context * data, " ".join(" ".join(flags).split()), stop)


def _strategy(random: Random, context: int, layers: int) -> str:
    if random.random() < 0.1:
        kinds = ("p2p", "all_gather", "a2a")
        named = [random.choice(kinds)] if random.random() < 0.5 else [random.choice(kinds) for _ in range(layers)]
        return f"--cp-comm-type {' '.join(named)} --cp-layout zigzag"
    fitting = [spec for spec in STRATEGIES if context % 2 == 0 or "head" not in spec]
    return f"--cp-strategy {random.choice(fitting).replace('LAYERS', str(layers - 1))}"


# ------------------------------------------------------------------------------------------------ the model


def _model(random: Random, experts: bool, layers: int, plain: bool) -> str:
    heads = random.choice((4, 4, 8))
    flags = [f"--num-layers {layers} --hidden-size 32 --num-attention-heads {heads} --transformer-impl local"]
    flags += [
        f"--ffn-hidden-size 48 --kv-channels {random.choice((HEAD_DIM, HEAD_DIM, NO_POWER_OF_2))} --init-method-std 0.1"
    ]
    flags += [f"--group-query-attention --num-query-groups {random.choice((2, 4))}"]
    flags += [random.choice(("--normalization RMSNorm", "--normalization LayerNorm"))]
    flags += [random.choice(("--swiglu", "--fast-geglu", "", _quick(random)))]
    flags += [_biases(random, plain)]
    flags += [random.choice(("", "--softmax-type learnable", "--softmax-type off-by-one"))]
    for some in ("--qk-layernorm", "--apply-layernorm-1p", "--sandwich-norm", "--scale-embeddings"):
        flags += [some * (random.random() < 0.2)]
    flags += ["--untie-embeddings-and-output-weights" * (random.random() < 0.5)]
    flags += ["--softmax-scale 0.2" * (random.random() < 0.2)]
    windowed = random.random() < 0.4
    if windowed:
        flags += [f"--window-size {random.choice((0, 3, 20))},0"]
        flags += [random.choice(("", "--window-attn-skip-freq 2", f"--window-attn-skip-freq [1]+[0]*{layers - 1}"))]
    flags += [_positions(random, windowed), _experts(random) if experts else ""]
    return " ".join(flags)


def _quick(random: Random) -> str:
    return "--quick-geglu" + random.choice(("", " --glu-linear-offset 1 --activation-func-clamp-value 1"))


def _biases(random: Random, plain: bool) -> str:
    """`plain`: none in the MLP, as experts need with tensor parallelism."""
    none = "--disable-bias-linear"
    return random.choice((none, f"{none} --add-qkv-bias", none if plain else ""))


def _positions(random: Random, windowed: bool) -> str:
    kind = random.choice(("rope", "rope", "learned_absolute", "yarn"))
    flags = [f"--position-embedding-type {kind}"]
    if kind == "yarn":
        flags += ["--rotary-scaling-factor 4 --yarn-original-max-position-embeddings 32"]
    if kind == "rope":
        flags += [random.choice(("", "--use-rope-scaling", "--rotary-seq-len-interpolation-factor 4"))]
        flags += ["--rotary-base-of-windows 50" * (windowed and random.random() < 0.4)]
        flags += [random.choice(("", "", "--rotary-percent 0.5"))]
    return " ".join(flags)


def _experts(random: Random) -> str:
    flags = ["--num-experts 4 --moe-ffn-hidden-size 24"]
    flags += [random.choice(("", "--moe-router-pre-softmax", "--moe-router-pre-softmax --moe-router-topk 1"))]
    flags += [random.choice(("", "--moe-aux-loss-coeff 0.01", "--moe-aux-loss-coeff 0.5"))]
    flags += [random.choice(("", "--moe-router-load-balancing-type seq_aux_loss"))]
    flags += [random.choice(("--moe-token-dispatcher-type alltoall", ""))]
    flags += [random.choice(("", "--disable-bias-linear --moe-shared-expert-intermediate-size 24"))]
    return " ".join(flags)


# ------------------------------------------------------------------------------------------------ data and optimizer


def _data(random: Random, schedule: Schedule) -> str:
    flags = [f"--seq-length {SEQUENCE} --num-workers 0"]
    kind = random.choice(("documents", "documents", "blend", "once", "splits", "chats", "packed"))
    if kind in ("documents", "blend"):
        flags += [random.choice(("", "", "--reset-attention-mask", "--reset-attention-mask --reset-position-ids"))]
        flags += ["--eod-mask-loss" * (random.random() < 0.4)]
    if kind == "packed":
        flags += ["--pack-documents"]
    if kind == "chats":
        return " ".join([*flags, "--sft", _tokenizer(), "--data-path DATA/chats.jsonl", _split(schedule)])
    flags += ["--tokenizer-type ByteLevelTokenizer"]
    documents, more = "DATA/corpus_text_document", "DATA/more_text_document"
    if kind == "splits":
        held_out = f"--valid-data-path {more} --test-data-path {documents}"
        return " ".join([*flags, f"--train-data-path 0.4 {documents} 0.6 {more}", held_out])
    several = {"blend": f"0.3 {documents} 0.7 {more}", "once": f"{more} {documents}"}
    return " ".join([*flags, f"--data-path {several.get(kind, documents)}", _split(schedule)])


def _tokenizer() -> str:
    return "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DATA/tokenizer"


def _split(schedule: Schedule) -> str:
    return "--split 60,30,10" if schedule.evaluated else "--split 100,0,0"


def _optimizer(random: Random) -> str:
    flags = [random.choice(("", "--weight-decay 0", "--weight-decay 0.5"))]
    flags += [random.choice(("", "--clip-grad 0", "--clip-grad 0.3"))]
    flags += [random.choice(("", "--adam-beta1 0.8 --adam-beta2 0.95"))]
    flags += [random.choice(("", "", "--decoupled-lr 0.003", "--decoupled-lr 0.003 --decoupled-min-lr 0.001"))]
    return " ".join(flags)


def _scaling(random: Random) -> str:
    """Of the loss in fp16. Scales in between overflow only where a rank has many tokens, so none is drawn."""
    scale, window = random.choice((4, 4, 2**26)), random.choice((1, 2, 1000))
    return f"--initial-loss-scale {scale} --loss-scale-window {window} --hysteresis {random.choice((1, 2))}"


# ------------------------------------------------------------------------------------------------ the layout


def _recomputation(random: Random, experts: bool) -> str:
    full = "--recompute-granularity full --recompute-method"
    names = ["core_attention", "qkv", "proj", "fc1", "fc2", "norms"]
    kept = f"--recompute-whitelist {' '.join(random.sample(names, random.randint(1, 6)))}"
    return random.choice(
        (
            "",
            "",
            f"{full} uniform --recompute-num-layers 1",
            f"{full} uniform --recompute-num-layers 2 --offload-checkpoints",
            f"{full} block --recompute-num-layers 1 {kept}",
            f"{full} uniform --recompute-num-layers 1 {kept} --offload-kept",
            f"{full} uniform --recompute-num-layers 1 {kept} --offload-kept --offload-checkpoints",
            "--recompute-activations",
            f"--recompute-granularity selective --recompute-modules core_attn {'moe' if experts else 'mlp layernorm'}",
            "" if experts else "--mlp-chunks-for-training 3",
        )
    )


def _sharding(random: Random, fsdp: bool, sharers: int) -> str:
    optimizer, strategy = "--use-distributed-optimizer", "--data-parallel-sharding-strategy"
    megatron = f"--use-megatron-fsdp {optimizer} {strategy}"
    of_fsdp = ("--use-torch-fsdp2", f"{megatron} optim_grads_params", f"{megatron} optim_grads", f"{megatron} optim")
    return random.choice(
        (
            "",
            "--overlap-grad-reduce",
            optimizer,
            f"{optimizer} --overlap-grad-reduce",
            f"{optimizer} --overlap-grad-reduce --overlap-param-gather",
            f"{optimizer} --num-distributed-optimizer-instances 2" if sharers % 2 == 0 else optimizer,
            *(of_fsdp if fsdp else ()),
        )
    )
