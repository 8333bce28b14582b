"""A cluster as data: its devices and links, and their rates. YAML files contain such descriptions.

Units are in the names: GB_s is 10^9 bytes per second in each direction, us 10^-6 seconds, TFLOP_s 10^12 operations per
second, GiB 2^30 bytes.
"""

import math
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from megatron.context_parallel.errors import UsageError

PRESETS = files(__package__) / "presets"
MASKS = ("full", "causal")
BACKWARD = 2.5  # operations of a backward pass for one of the forward pass: five matrix products against two


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """The rate of one kernel call. Only the pairs of rows that the mask does not empty count as operations."""

    rows: int  # queries
    keys: int | None = None  # more than queries; default: as many
    mask: str = "full"  # or "causal"
    dtype: str = "bf16"
    head_dim: int = 128
    forward_TFLOP_s: float
    backward_TFLOP_s: float

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise UsageError(f"device.attention.mask {self.mask}: give {' or '.join(MASKS)}")
        if self.keys is not None and (self.keys <= self.rows or self.mask != "full"):
            raise UsageError(
                f"device.attention.keys {self.keys}: give more than {self.rows} rows, and no mask; for equal numbers, "
                "leave out keys"
            )

    @property
    def side(self) -> float:
        """Rows of a square block with as many pairs."""
        return math.sqrt(self.rows * (self.keys or self.rows))


@dataclass(frozen=True, kw_only=True)
class GemmRate:
    """The rate of a matrix product."""

    size: int  # cube root of m x n x k
    dtype: str = "bf16"
    TFLOP_s: float


# Of a device's memory, what tensors may take. An 80 GB GPU was full with 75.3 GiB of tensors: the allocator had 1.8 GiB
# that it could not use, CUDA 1.0 GiB, and the driver 0.8 GiB (github.com/vllm-project/compressed-tensors/pull/587).
TENSOR_SHARE = 0.94


def for_tensors(memory_GiB: float) -> float:
    """Bytes that tensors may take of a device's memory."""
    return TENSOR_SHARE * memory_GiB * 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, or another compute device."""

    name: str
    peak_TFLOP_s: float  # dense, 16-bit
    peak_fp8_TFLOP_s: float | None = None  # dense, 8-bit; None: it has no such products
    memory_GiB: float
    memory_GB_s: float
    attention: tuple[AttentionRate, ...]
    block_us: float = 10.0  # overhead of a kernel call
    gemm: tuple[GemmRate, ...] | None = None  # default: 0.7 of the peak at every size
    kernel_us: float = 5.0  # overhead of a kernel outside attention
    step_us: float = 0.0  # overhead of a step of a plan, before its communication starts
    pass_us: float = 0.0  # overhead of an attention pass, before its first step
    cache_us: float = 0.0  # additional cost of a prefill with a cache, per layer: page tables, copies, launches
    swap_us: float = 0.0  # overhead of a head swap, before its messages start
    packing_GB_s: float | None = None  # memory traffic while heads are packed for a swap; default: `memory_GB_s`
    host_GB_s: float | None = None  # copies to host memory, or back; None: not known


@dataclass(frozen=True, kw_only=True)
class IntraNode:
    """The links inside a node: one from each device to a switch, or one shared by all devices."""

    GB_s: float
    latency_us: float
    stream_GB_s: float | None = None  # maximum rate of a plan's messages from one rank to another
    shared: bool = False
    processor_ns_per_byte: float = 0.0  # at each end, of a processor that ranks share; 0 where devices do this work


@dataclass(frozen=True, kw_only=True)
class Nics:
    """The links between nodes. The NICs of a node serve its devices in equal consecutive groups."""

    per_node: int
    GB_s: float
    latency_us: float
    stream_GB_s: float | None = None  # as inside
    processor_ns_per_byte: float = 0.0  # as inside
    crowding: float = 0.0  # with k pairs of ranks in a direction, it has 1 / (1 + crowding (k - 1)) of its rate
    spread: float = 0.0  # ranks wait for the slowest NIC: of k nodes it has 1 / (1 + spread log2(k)) of the rate


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices.

    Attributes:
        source: where the numbers are from.
        nodes_per_switch, oversubscription: the uplink of a leaf switch carries what all its NICs carry, divided by
            `oversubscription`.
        compute_slowdown, message_slowdown: work that takes 1 second alone takes 1 + this while a device computes and
            sends or receives at the same time.
        shared_cores: processors that all ranks have together; each computes on at most one. For a cluster emulated on
            one host, which may have more.
        busy_latency_us: additional latency of a message for each rank that computes, if ranks compute on all shared
            processors.
        buffered_sends: a message is complete for its sender when it starts, and messages of a channel overlap (gloo);
            otherwise when it has arrived, and they are sequential (NCCL).
        message_us: processor time per message at each end, independent of its size; 0 if devices do this work.
        iteration_ms: fixed time of a training iteration besides computation and communication.
    """

    name: str
    source: str
    nodes: int
    devices_per_node: int
    device: Device
    inside: IntraNode | None = None
    nics: Nics | None = None
    nodes_per_switch: int | None = None
    oversubscription: float = 1.0
    compute_slowdown: float = 0.0
    message_slowdown: float = 0.0
    shared_cores: float | None = None
    busy_latency_us: float = 0.0
    buffered_sends: bool = False
    message_us: float = 0.0
    iteration_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.devices_per_node > 1 and self.inside is None:
            raise UsageError(f"{self.name}: inside is missing, but nodes have {self.devices_per_node} devices")
        if self.nodes > 1 and self.nics is None:
            raise UsageError(f"{self.name}: nics is missing, but there are {self.nodes} nodes")
        if self.nics and self.devices_per_node % self.nics.per_node:
            raise UsageError(
                f"{self.name}: nics.per_node {self.nics.per_node} does not divide {self.devices_per_node} devices"
            )

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices_per_node

    def part(self, ranks: int) -> "Cluster":
        """The cluster with as many nodes, or devices of one node, as `ranks` need; it may get more nodes than it has.

        Raises:
            UsageError: several nodes are needed, and the ranks do not fill the last one.
        """
        each = self.devices_per_node
        if ranks < each:
            return replace(self, nodes=1, devices_per_node=ranks, nics=None)
        if ranks % each:
            raise UsageError(
                f"{self.name}: {ranks} ranks do not fill nodes of {each} devices; give {ranks // each * each}"
            )
        return replace(self, nodes=ranks // each)


def load_cluster(name: str, flag: str = "--cluster") -> Cluster:
    """The cluster of a preset or of a YAML file, `name` being the value of `flag`.

    Raises:
        UsageError: no such file or preset, or one that does not describe a cluster.
    """
    import yaml

    known = sorted(p.name.removesuffix(".yaml") for p in PRESETS.iterdir() if p.name.endswith(".yaml"))
    path = Path(name) if name.endswith((".yaml", ".yml")) else PRESETS / f"{name}.yaml"
    if not path.is_file():
        raise UsageError(f"{flag} {name}: no such file or preset; give a .yaml file, or one of {', '.join(known)}")
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {name}: not YAML ({str(error).splitlines()[0]})") from None
    try:
        return _read(Cluster, content, "")
    except UsageError as error:
        raise UsageError(f"{flag} {name}: {error}") from None


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Writes a YAML file from which `load_cluster` reads the same cluster."""
    import yaml

    path.write_text(yaml.safe_dump(_plain(cluster), sort_keys=False, default_flow_style=None, width=120))


def _plain(value: Any) -> Any:
    """A dataclass as a dict, without fields that have their default."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not is_dataclass(value):
        return value
    return {f.name: _plain(given) for f in fields(value) if (given := getattr(value, f.name)) != f.default}


def _read(kind: Any, value: object, where: str) -> Any:
    """`value` from YAML as a `kind`: a dataclass, a tuple of them, a number, a text or a truth."""
    if NoneType in get_args(kind):
        return None if value is None else _read(get_args(kind)[0], value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or not value:
            raise UsageError(f"{where}: give a list of one or more")
        return tuple(_read(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if kind in (int, float, bool, str):
        return _checked(kind, value, where)
    if not isinstance(value, dict):
        raise UsageError(f"{where or 'the file'}: give {', '.join(field.name for field in fields(kind))}")
    hints = get_type_hints(kind)
    if unknown := value.keys() - hints.keys():
        raise UsageError(f"{where}{'.' * bool(where)}{min(map(str, unknown))}: unknown; use one of {', '.join(hints)}")
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in value]
    if missing:
        raise UsageError(f"{where}{'.' * bool(where)}{missing[0]}: missing")
    return kind(
        **{name: _read(hints[name], given, f"{where}{'.' * bool(where)}{name}") for name, given in value.items()}
    )


def check_number(value: int | float, where: str) -> int | float:
    """The value of the field at the path `where`. Raises UsageError for one that it may not have."""
    checked: int | float = _checked(type(value), value, where)
    return checked


_MAY_BE_ZERO = ("_us", "_ms", "_slowdown", "_ns_per_byte", "crowding", "spread")


def _checked(kind: type, value: Any, where: str) -> Any:
    number = kind in (int, float)
    good = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if good and number:
        good = math.isfinite(value) and (value > 0 or (value == 0 and where.endswith(_MAY_BE_ZERO)))
    if not good:
        needed = {int: "a whole number, 1 or more", float: "a number above 0", bool: "true or false", str: "a text"}
        raise UsageError(f"{where} {value}: need {needed[kind]}")
    return kind(value)
