"""A fuzzed case: its fields, its random generation, and its form as one line."""

import json
from dataclasses import dataclass, fields
from random import Random

from megatron.context_parallel import STRATEGIES
from megatron.context_parallel.plan.ir import RANK_PLACEMENTS
from megatron.context_parallel.strategies import Strategy, spec_text

IN_PROCESS, ON_RANKS, MUTATION = "in process", "on ranks", "mutation"
MOST_RANKS = 64  # in one process
MOST_SPLIT_IN_ROUNDS = 8  # head-parallel ranks; with more, there would be too many heads
KERNELS = {"float64": ("default", "reference", "runs"), "float32": ("default", "default", "runs")}
SHORT = ("bfloat16", "float16")
LONGEST = 600  # tokens; the oracle's matrices have the square of it
HEAD_DIMS = (1, 2, 4, 5, 8, 16, 16, 32, 64, 64, 80, 128, 192, 256)
LONG = 2500  # of some calls, which have few heads: kernels cut blocks of more than 256 rows into tiles


@dataclass
class Call:
    """One attention. Lengths count the tokens of the whole sequence.

    Attributes:
        seed: of the inputs.
        kernel: "default", "reference" for the package's exact one, or "runs" for the same with whole blocks. It gets
            them as runs of all samples, like the kernel for GPUs.
        documents: for each sample (or one for all) runs (id, tokens), of which neighbours differ; id -1 is padding.
        documents_as: how documents are given: by "ids", by their end tokens ("after"), or by cu_seqlens ("packed").
        placement: of the batch, its samples end to end: for each chunk slices [first, end], or for how many chunks the
            package's solver decides; default: as the layout says.
        inputs: "ordinary", "large" scores, or a "sink": a first token that takes most weight and has a tiny value.
        strided: inputs and output gradient are views that are not contiguous.
        recompute: the forward pass runs once without gradients, and the second one uses the kept results.
        value_dim, kv_length: default: `head_dim`, `length`.
        sinks_dtype: default: `dtype`.
        tensor_layout: the order of dimensions of what is given and returned.
        autocast: inputs are float32, and cast to the dtype of 16 bits by torch.autocast.
        expanded: keys and values of all heads are one tensor, and the output gradient is a number, without copies.
        frozen: the inputs that need no gradient, "q", "k" or "v".
        garbage: queries that see nothing, and keys and values that nothing sees, are NaN, infinite or large.
        dout: the output gradient is "ordinary", "gaps" (rows of zeros), "tiny" or "huge".
    """

    seed: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    dtype: str = "float32"
    kernel: str = "default"
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    documents: list | None = None
    documents_as: str = "ids"
    placement: list | int | None = None
    scale: float | None = None
    inputs: str = "ordinary"
    strided: bool = False
    recompute: bool = False
    value_dim: int | None = None
    kv_length: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    sinks_dtype: str | None = None
    tensor_layout: str = "sbhd"
    autocast: bool = False
    expanded: bool = False
    frozen: str = ""
    garbage: bool = False
    dout: str = "ordinary"


@dataclass
class Case:
    """A context group and its calls: forward in turn, then backward from the last to the first, like layers.

    `groups` of n ranks do the same side by side, on ranks only: rank r belongs to group r % groups.

    With `in_turn` the backward passes have the order of the forward passes, like micro batches in a pipeline.
    """

    kind: str
    strategy: str
    layout: str
    n: int
    options: dict
    calls: list[Call]
    groups: int = 1
    in_turn: bool = False


def to_json(case: Case) -> str:
    """One line, without what has its default."""
    return json.dumps(_given(case) | {"calls": [_given(call) for call in case.calls]})


def _given(x: Case | Call) -> dict:
    return {f.name: value for f in fields(x) if (value := getattr(x, f.name)) != f.default}


def from_json(text: str) -> Case:
    case = Case(**json.loads(text))
    case.calls = [Call(**call) for call in case.calls]
    for call in case.calls:
        call.window = tuple(call.window)
    case.options = {name: tuple(x) if isinstance(x, list) else x for name, x in case.options.items()}
    return case


def draw(random: Random, kind: str, ranks: int) -> Case:
    """A case of up to `ranks` ranks, of any registered strategy. One in 30 has sizes that may be incompatible."""
    strategy = STRATEGIES[random.choice(sorted(STRATEGIES))]
    layout, n = random.choice(strategy.layouts), random.randint(1, ranks)
    if kind == IN_PROCESS and random.random() < 0.1:
        n = random.randint(1, MOST_RANKS)
    careless = random.random() < 1 / 30
    size = _head_parallel_size(random, strategy, n)
    default = size if strategy.head_parallel == "all" else 1
    size = random.randint(1, n + 1) if careless else size
    options = _options(random, strategy, max(1, n // size))
    if size != default:
        options["head_parallel_size"] = size
    rounds = random.choice((1, 1, 1, 2, 3, 4)) if 1 < size <= MOST_SPLIT_IN_ROUNDS else 1
    if rounds > 1:
        options["head_rounds"] = rounds
    elif layout == "cyclic" and "token_rounds" in strategy.options and random.random() < 0.5:
        options["token_rounds"] = random.choice((2, 3, 4))
    if random.random() < 0.3:
        options["placement"] = random.choice(RANK_PLACEMENTS)
    unit = (2 * n if layout == "zigzag" else n) * options.get("token_rounds", 1)
    first = _call(random, n, 1 if careless else size, rounds, unit)
    calls = [first]
    for _ in range(random.choice((0, 0, 1, 2))):
        calls.append(_another(random, first, n, size, rounds, unit))
    groups = random.randint(1, ranks // n) if kind == ON_RANKS else 1
    if random.random() < 0.1:
        options["partials_in_16_bits"] = True
        for call in calls:
            call.dtype, call.kernel = call.dtype if call.dtype in SHORT else "bfloat16", "default"
    name = strategy.name
    if random.random() < 0.1:
        name = _with_another_backward_pass(random, strategy, layout, options, max(1, n // size))
    return Case(kind, name, layout, n, options, calls, groups, random.random() < 0.5)


def _with_another_backward_pass(random: Random, strategy: Strategy, layout: str, options: dict, n: int) -> str:
    """The spec of two strategies that share the tokens alike. It takes the first one's own options out of `options`."""
    fitting = [s for s in STRATEGIES.values() if layout in s.layouts and s.head_parallel == strategy.head_parallel]
    own = {name: options.pop(name) for name in strategy.options if name in options}
    back = random.choice(fitting)
    of_back = _options(random, back, n)
    of_back.pop("token_rounds", None)  # would have to divide the tokens of a rank
    if options.get("partials_in_16_bits") and random.random() < 0.5:
        random.choice((own, of_back))["partials_in_16_bits"] = options.pop("partials_in_16_bits")
    return f"{spec_text(strategy.name, **own)}+{spec_text(back.name, **of_back)}"


def _head_parallel_size(random: Random, strategy: Strategy, n: int) -> int:
    match strategy.head_parallel:
        case "all":
            return n
        case "required":
            return random.choice(_divisors(n)[1:] or [1])
    return 1 if random.random() < 0.6 else random.choice(_divisors(n))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _options(random: Random, strategy: Strategy, n: int) -> dict:
    """Some of the strategy's own options for n context ranks, by their types."""
    own = strategy.options.items()
    drawn = {name: _value(random, option.kind, n) for name, option in own if random.random() < 0.6}
    return {name: value for name, value in drawn.items() if value is not None}


def _value(random: Random, kind: object, n: int) -> object:
    """A value of a type that options have; None, for the default, of one not known here."""
    if kind is bool:
        return random.random() < 0.5
    if kind is int:
        return random.choice(_divisors(n))
    if kind is float:
        return random.choice((2.5, 1.0, 0.3))
    if kind == tuple[int, int]:
        rows = random.choice(_divisors(n))
        return rows, n // rows
    return None


def _call(random: Random, n: int, head_parts: int, rounds: int, unit: int) -> Call:
    kv_heads, heads = random.choice(_heads(head_parts, rounds))
    size = random.choice(
        (1, 1, 2, 3, 4, *(random.randint(1, 12) for _ in range(4)), random.randint(1, 60), LONGEST // unit)
    )
    length = unit * max(1, min(size, LONGEST // unit))
    call = Call(random.randrange(10**6), length, heads, kv_heads, random.choice(HEAD_DIMS))
    call.batch = random.choice((1, 2)) if length * heads > 3000 else random.randint(1, 5)
    if LONG // unit * unit > LONGEST and heads <= 4 and random.random() < 0.05:
        call.batch, call.length = 1, unit * random.randint(1 + LONGEST // unit, LONG // unit)
        length = call.length
    call.dtype = random.choice(("float32", "float32", "float64", *SHORT))
    call.kernel = random.choice(KERNELS.get(call.dtype, ("default",)))
    call.causal = random.random() < 0.7
    if random.random() < 0.35:
        call.window = _window(random, length)
    if random.random() < 0.4:
        call.documents_as = random.choice(("ids", "after", "packed"))
        samples = random.choice((1, call.batch))
        call.documents = [_runs(random, length, call.documents_as != "after") for _ in range(samples)]
    call.scale = random.choice((None, None, 1.0, 0.05, 0.37))
    call.inputs = random.choice(("ordinary", "ordinary", "large", "sink"))
    if call.dtype == "float16" and call.inputs == "large":
        call.inputs = "ordinary"  # its gradients may be beyond the largest number
    call.strided, call.recompute = random.random() < 0.2, random.random() < 0.15
    _new_features(random, call, unit)
    if call.documents:
        _place(random, call, n, head_parts)
    return call


def _another(random: Random, first: Call, n: int, head_parts: int, rounds: int, unit: int) -> Call:
    """The next call: most often another layer of the model, the same but for the data; or the same in another batch."""
    kind = random.choice(("layer", "layer", "unlike layer", "batch", "call"))
    call = _call(random, n, head_parts, rounds, unit) if kind == "call" else Call(**vars(first))
    call.seed = random.randrange(10**6)
    if kind == "unlike layer":
        call.window = random.choice((call.window, (random.randint(0, call.length), -1)))
        call.softcap, call.scale = 5.0 - min(5.0, call.softcap), 0.37
    elif kind == "batch" and call.documents:
        call.documents = [_runs(random, call.length, call.documents_as != "after") for _ in range(call.batch)]
        _place(random, call, n, head_parts)
    return call


def _place(random: Random, call: Call, n: int, head_parts: int) -> None:
    """Perhaps gives a batch of documents its own placement."""
    call.placement = None
    if n % head_parts == 0 and random.random() < 0.5:
        call.documents = call.documents * (call.batch // len(call.documents))
        call.placement = random.choice((n // head_parts, _slices(random, n // head_parts, call.batch * call.length)))


def _slices(random: Random, n: int, length: int) -> list[list[list[int]]]:
    """Slices between random tokens, dealt in any order to n chunks of equal size."""
    cuts = sorted(random.sample(range(1, length), random.randint(0, min(length - 1, 4 * n))))
    slices = [[first, end] for first, end in zip([0, *cuts], [*cuts, length], strict=True)]
    random.shuffle(slices)
    chunks: list[list[list[int]]] = [[] for _ in range(n)]
    dealt = 0
    for first, end in slices:
        while first < end:
            chunk, before = divmod(dealt, length // n)
            taken = min(length // n - before, end - first)
            chunks[chunk].append([first, first + taken])
            first += taken
            dealt += taken
    return [sorted(chunk) for chunk in chunks]


def _heads(size: int, rounds: int) -> list[tuple[int, int]]:
    """(kv_heads, heads) that `size` head-parallel ranks can share and compute in so many rounds."""
    parts = size * rounds
    kv = {1, 2, 3, parts, *_divisors(parts)}
    return [
        (k, k * group)
        for k in sorted(kv)
        for group in {1, 2, 3, parts}
        if k * group <= max(24, parts)
        and k * group % parts == 0
        and (k % parts == 0 or parts % k == 0)
        and (k % size == 0 or size % k == 0)
    ]


def _window(random: Random, length: int) -> tuple[int, int]:
    """A window with limits on one side or on both."""
    before, after = (random.choice((0, 1, random.randint(0, length), random.randint(0, 20))) for _ in range(2))
    return random.choice(((before, after), (before, -1), (-1, after)))


def _runs(random: Random, length: int, padding: bool) -> list[list[int]]:
    """Runs of `length` tokens in all, short and long ones."""
    runs: list[list[int]] = []
    while length:
        count = random.choice((1, random.randint(1, 4), random.randint(1, length), random.randint(1, length)))
        count = length if len(runs) == 60 else min(count, length)
        last = runs[-1][0] if runs else None
        allowed = [i for i in (0, 1, 2, -1) if i != last and (padding or i >= 0)]  # ids come again
        runs.append([random.choice(allowed), count])
        length -= count
    return runs


def _new_features(random: Random, call: Call, unit: int) -> None:
    if random.random() < 0.15:
        call.value_dim = random.choice((1, 4, 8, 24, 128))
    if call.documents is None and random.random() < 0.15:
        call.kv_length = unit * random.randint(1, max(1, LONGEST // unit))
        call.causal = random.random() < 0.5
        call.window = random.choice((call.window, _window(random, call.length)))
    if random.random() < 0.15:
        call.softcap = random.choice((0.5, 5.0, 50.0))
    if random.random() < 0.15:
        call.sinks = True
        call.sinks_dtype = random.choice((None, None, "float32", *SHORT))
    call.tensor_layout = random.choice(("sbhd", "sbhd", "bshd", "bhsd"))
    call.autocast = call.dtype in SHORT and random.random() < 0.2
    call.expanded = random.random() < 0.1
    call.frozen = random.choice(("", "", "", "", "", "q", "k", "v", "qk", "kv"))
    call.garbage = call.kernel == "default" and random.random() < 0.5
    call.dout = random.choice(("ordinary", "ordinary", "ordinary", "ordinary", "gaps", "tiny", "huge"))
    if "float16" in (call.dtype, call.sinks_dtype) and call.dout == "huge":
        call.dout = "ordinary"
