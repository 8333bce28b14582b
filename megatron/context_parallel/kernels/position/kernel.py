"""The position kernel: attention of a block under any mask in one launch, in Triton."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, KeyRanges, Piece, PieceMask
from megatron.context_parallel.kernels.to_device import to_device

from . import fences
from .tiles import FLOAT32, TILES, Tiles

PARTS = {64: (64, 0), 80: (64, 16), 96: (64, 32), 128: (128, 0), 192: (128, 64), 256: (256, 0)}  # powers of two
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_of_key_ranges = WeakTensorKeyDictionary()  # by the ends of ranges
FEW_ROWS = 16  # below, programs share the keys of a block: its rows alone would not occupy a GPU
PROGRAMS = 2  # for each multiprocessor, of a block with few rows
THREADS = 32  # of a warp
FURTHEST = 2**31 // 256  # elements between rows: offsets inside a tile are 32 bits wide


class PositionKernel:
    """Forward and backward of blocks under any mask: each query row sees one range of key rows.

    Shapes: queries [s, B, G, d], keys [t, B, d] and values [t, B, dv] of one dtype (float16, bfloat16, float32),
    with any strides but a contiguous last dimension; log-sum-exp and delta [s, B, G] in float32. B is batch ×
    key/value heads, batch first; G the query heads that share one; d and dv are 64, 80, 96, 128, 192 or 256. Products
    are accumulated in float32. Products of float32 use TF32 only if PyTorch's may
    (`torch.backends.cuda.matmul.fp32_precision`).

    Masks: FULL, CAUSAL (s = t), or ranges on q's device, common to all samples or one for each.

    Args:
        device: where the tensors are: a GPU of compute capability 8.0, 9.0 or 10.x.
        deterministic: gradients are bitwise reproducible, at 7 matrix products per tile instead of 5. With a softcap,
            for dv other than d, and if `TILES` has no "dqkv" for a head_dim, they always are.

    Raises:
        UsageError: Triton is missing, or has no configuration for the device.
    """

    name = "triton"

    def __init__(self, device: torch.device, *, deterministic: bool = False) -> None:
        self.device, self.deterministic = device, deterministic
        self.architecture = _architecture(device)
        self.tiles = TILES.get(self.architecture, {})  # none in the interpreter
        on_gpu = device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1

    def pieces(self, block: KeyRanges, keys: int) -> list[Piece]:
        """The whole block in one piece, with its ranges copied to the device without waiting."""
        rows = slice(0, block.first.shape[1])
        return [Piece(rows, slice(0, keys), KeyRanges(*to_device(torch.stack(block), self.device)))]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, scores: Scores) -> tuple[Tensor, Tensor]:
        """Returns the output [s, B, G, dv] in q's dtype and its log-sum-exp [s, B, G] in float32.

        A row that sees no key gets 0 and -inf.

        Raises:
            UsageError: shapes, dtypes or strides that the class does not support.
        """
        from .forward import forward_kernel

        common = _common(q, k, v, mask, scores)
        out, lse = q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3], dtype=torch.float32)
        if len(q) < FEW_ROWS:
            return self._few_rows(out, lse, common, scores)
        tiles = self._tiles("forward", q, v, scores)
        forward_kernel[_count(len(q), tiles.rows), q.shape[1] * q.shape[2]](
            out=out, lse=lse, **_strides(q=q, k=k, v=v, out=out, lse=lse), **common, **_launch(tiles)
        )
        return out, lse

    def _few_rows(self, out: Tensor, lse: Tensor, common: dict[str, Any], scores: Scores) -> tuple[Tensor, Tensor]:
        """`forward` with the keys of each head split, so that all multiprocessors read keys."""
        from .few_rows import few_rows_kernel, merge_parts_kernel

        q, k, v = common["q"], common["k"], common["v"]
        tiles = self._tiles("few rows", q, v, scores)
        s, heads, group, dv = out.shape
        rows = min(tiles.rows, max(16, 1 << (s * group - 1).bit_length()))
        programs = heads * _count(s * group, rows)
        tiles_a_part = _count(_count(len(k), tiles.keys), _count(PROGRAMS * self.processors, programs))
        parts = _count(len(k), tiles_a_part * tiles.keys)
        out_of_parts, lse_of_parts = (lse.new_empty(parts, heads, s * group, *last) for last in ((dv,), ()))
        few_rows_kernel[parts, heads, _count(s * group, rows)](
            out=out_of_parts, lse=lse_of_parts, keys_a_part=tiles_a_part * tiles.keys, **common,
            **_strides(q=q, k=k, v=v), **_launch(tiles._replace(rows=rows)),
        )  # fmt: skip
        sizes = {name: common[name] for name in ("s", "group", "DV", "EV")}
        merge_parts_kernel[_count(s * heads * group, 16),](
            out, lse, out_of_parts, lse_of_parts, parts, heads=heads, at_out=dv, at_lse=1, at_parts=dv,
            at_lse_of_parts=1, ROWS=16, enable_fp_fusion=True, **sizes,
        )  # fmt: skip
        return out, lse

    def backward(self, grad: BlockGrad, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq [s, B, G, d], dk [t, B, d] and dv [t, B, dv] of this block in float32.

        Raises:
            UsageError: as `forward`.
        """
        from megatron.context_parallel.kernels.delta_triton import by_head

        from .backward import key_grad_kernel, query_grad_kernel

        dout, q, k, v, lse, delta, mask = grad
        if dout.shape != (*q.shape[:3], v.shape[-1]) or dout.dtype != q.dtype:
            raise UsageError(f"dout {list(dout.shape)} of {dout.dtype}: need the output's shape and q's {q.dtype}")
        same_width = dout.shape == q.shape  # then the kernels use the same addresses for dout and q, and for dv and dk
        if not same_width or dout.stride() != q.stride():
            q, dout = q.contiguous(), dout.contiguous()
        common = _common(q, k, v, mask, scores)
        dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse2, delta = by_head(lse, delta)
        common |= {"dout": dout, "lse2": lse2, "delta": delta, "dq": dq}
        common |= _strides(q=q, k=k, v=v, dq=dq) | ({"at_dout": None} if same_width else _strides(dout=dout))
        one_launch = same_width and not (self.deterministic or scores.softcap)
        tiles_of_all = self._tiles_if_any("dqkv", q, v, scores) if one_launch else None
        if tiles_of_all:
            dq.zero_()  # added to
        else:
            tiles = self._tiles("dq", q, v, scores)
            query_grad_kernel[_count(len(q), tiles.rows), q.shape[1] * q.shape[2]](**common, **_launch(tiles))
        tiles = tiles_of_all or self._tiles("dkv", q, v, scores)
        programs = _count(len(k), tiles.keys), k.shape[1]
        parts = _parts_of_group(programs, q.shape[2], self.processors)
        dk, dv = (x.new_empty((len(x), x.shape[1] * parts, x.shape[2]), dtype=torch.float32) for x in (k, v))
        if parts > 1:
            common |= _split_group(parts, q, dout, dq, mask)
        at_grads = _strides(dk=dk) | ({"at_dv": None} if same_width else _strides(dv=dv))
        rows_seeing = _once(_rows_seeing, mask, len(k), tiles.keys) if isinstance(mask, KeyRanges) else None
        key_grad_kernel[programs[0], dk.shape[1]](
            dk=dk, dv=dv, rows_seeing=rows_seeing, parts=parts, WITH_DQ=bool(tiles_of_all), COPIES=_copies(tiles),
            **common, **_launch(tiles), **at_grads,
        )  # fmt: skip
        if parts > 1:
            dk, dv = (x.unflatten(1, (-1, parts)).sum(2) for x in (dk, dv))
        return dq, dk, dv

    def _tiles(self, kernel: str, q: Tensor, v: Tensor, scores: Scores) -> Tiles:
        found = self._tiles_if_any(kernel, q, v, scores)
        assert found  # all kernels except dqkv have tiles
        return found

    def _tiles_if_any(self, kernel: str, q: Tensor, v: Tensor, scores: Scores) -> Tiles | None:
        if q.dtype is torch.float32 or self.device.type == "cpu":
            return FLOAT32
        found = self.tiles
        size = max(q.shape[-1], v.shape[-1])
        capped = found.get(f"capped {kernel}", {}).get(size) if scores.softcap else None
        return capped or found[kernel].get(size)


def _architecture(device: torch.device) -> int:
    if importlib.util.find_spec("triton") is None:
        raise UsageError("--cp-attention-backend triton: Triton is not installed (pip install triton)")
    import triton

    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return 0
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    found = architecture((major, minor))
    if found not in TILES:
        raise UsageError(
            f"--cp-attention-backend triton: {device} has compute capability {major}.{minor}, but the kernel "
            "runs on 8.0, 9.0 and 10.x; choose one by kernel_for(device, dtype, head_dim)"
        )
    return found


def architecture(capability: tuple[int, int]) -> int:
    """The key of `TILES` for a GPU of that compute capability, or None: 90 for 9.0, 100 for all 10.x."""
    major, minor = capability
    return 100 if major == 10 else 10 * major + minor


def triton_refusal(dtype: torch.dtype, head_dims: Sequence[int], capability: tuple[int, int] | None) -> str | None:
    """Why Triton's kernels cannot compute with these, or None.

    Args:
        head_dims: of keys and values; capability: of the GPU, if there is one.
    """
    if dtype not in DTYPES:
        return f"the position kernel does not support {str(dtype).removeprefix('torch.')}"
    if lacking := [d for d in head_dims if d not in PARTS]:
        return f"the position kernel supports head_dim {', '.join(map(str, PARTS))}, not {lacking[0]}"
    if capability is not None and architecture(capability) not in TILES:
        return "the position kernel does not run on sm_{}{}".format(*capability)
    if capability is not None and importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return None


def refusal(dtype: torch.dtype, head_dims: Sequence[int], capability: tuple[int, int] | None) -> str | None:
    """Why the position kernel cannot compute with these, or None. Arguments as of `triton_refusal`."""
    if why := triton_refusal(dtype, head_dims, capability):
        return why
    if capability is not None and architecture(capability) == 100:
        import triton

        if fences.lacking(triton.__version__):
            name = "sm_{}{}".format(*capability)
            return f"Triton {triton.__version__} may compute wrong products on {name}; install torch 2.12.1 or newer"
    return None


def _check(q: Tensor, k: Tensor, v: Tensor, mask: PieceMask) -> None:
    s, batch, _, d = q.shape
    dv = v.shape[-1]
    if d not in PARTS or dv not in PARTS or q.dtype not in DTYPES:
        sizes = f"head_dim {d}" if d == dv else f"head_dim {d} and value head_dim {dv}"
        raise UsageError(f"the position kernel with {sizes} in {q.dtype}: need {[*PARTS]}, in 16 or 32 bits")
    if k.shape[:2] != v.shape[:2] or k.shape[1:] != (batch, d) or not q.dtype == k.dtype == v.dtype:
        raise UsageError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} of {q.dtype}, {k.dtype}, {v.dtype}: "
            "need [s, B, G, d], [t, B, d] and [t, B, dv] of one dtype"
        )
    if any(x.stride(-1) != 1 or x.stride(0) > FURTHEST for x in (q, k, v)):
        raise UsageError(f"rows of q, k, v: need a contiguous last dimension and strides up to {FURTHEST}")
    if mask == CAUSAL and s != len(k):
        raise UsageError(f"a causal block of {s} queries and {len(k)} keys: must be square")
    if isinstance(mask, KeyRanges) and (mask.first.shape[1] != s or batch % len(mask.first)):
        raise UsageError(f"ranges of {list(mask.first.shape)} for q {list(q.shape)}: need [1 or batch, {s}]")


def _common(q: Tensor, k: Tensor, v: Tensor, mask: PieceMask, scores: Scores) -> dict[str, object]:
    """The arguments all kernels share."""
    _check(q, k, v, mask)
    s, batch, group, d = q.shape
    dv = v.shape[-1]
    ranges = mask if isinstance(mask, KeyRanges) else None
    bounds: dict[str, object] = {"first": None, "end": None, "seen_keys": None}
    if ranges:
        seen = _once(_seen_keys, ranges, len(k))
        bounds = {"first": ranges.first.contiguous(), "end": ranges.end.contiguous(), "seen_keys": seen}
    heads_a_sample = batch // len(ranges.first) if ranges else batch
    sizes = {"s": s, "t": len(k), "group": group, "heads_a_sample": heads_a_sample, "scale": scores.scale}
    kind = {"MASK": "key_ranges" if ranges else mask, "SOFTCAP": float(scores.softcap), "PRECISION": precision(q)}
    widths = dict(zip(("D", "E", "DV", "EV"), (*PARTS[d], *PARTS[dv]), strict=True))
    return {"q": q, "k": k, "v": v} | bounds | sizes | kind | widths


def precision(q: Tensor) -> str:
    """Triton's name for how products are computed: float32 in TF32 only if PyTorch's may be.

    `allow_tf32` cannot be read where the newer `fp32_precision` was set, which follows both.
    """
    return "tf32" if q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _strides(**tensors: Tensor) -> dict[str, tuple[int, ...]]:
    """The strides of all dimensions except head_dim."""
    dims = {"k": 2, "v": 2, "dk": 2, "dv": 2}
    return {f"at_{name}": x.stride()[: dims.get(name, 3)] for name, x in tensors.items()}


def _launch(tiles: Tiles) -> dict[str, object]:
    return {
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "enable_fp_fusion": True,
    }


def _copies(tiles: Tiles) -> int:
    """How often the kernel for dk and dv reads each number of a row, such as its log-sum-exp.

    In Triton 3.6 each thread of a loop copies all numbers that it uses to shared memory itself, unless a load has as
    many elements as the program has threads.
    """
    import triton

    return max(1, THREADS * tiles.warps // tiles.rows) if _copies_alone(triton.__version__) else 1


@cache
def _copies_alone(version: str) -> bool:
    """Whether threads do that in this version of Triton."""
    return TorchVersion(version) < "3.7"


def _count(length: int, tile: int) -> int:
    return -(-length // tile)


def _parts_of_group(programs: tuple[int, int], group: int, processors: int) -> int:
    """The number of parts of a group's query heads that gives every multiprocessor a program."""
    enough = -(-processors // (programs[0] * programs[1]))
    return next((parts for parts in range(1, group) if group % parts == 0 and parts >= enough), group)


def _split_group(parts: int, q: Tensor, dout: Tensor, dq: Tensor, mask: PieceMask) -> dict[str, object]:
    """Arguments by query head, with the query heads of each key/value head split into parts."""
    group = q.shape[2] // parts
    samples = len(mask.first) if isinstance(mask, KeyRanges) else 1
    q, dout, dq = (x.flatten(1, 2).unflatten(1, (-1, group)) for x in (q, dout, dq))
    at_dout = {} if dout.shape == q.shape else _strides(dout=dout)
    changed = {"q": q, "dout": dout, "dq": dq, "group": group, "heads_a_sample": q.shape[1] // samples}
    return changed | _strides(q=q, dq=dq) | at_dout


def _once(make: Callable[..., Tensor], ranges: KeyRanges, *sizes: int) -> Tensor:
    """`make(ranges, *sizes)`, computed once for all layers. It lives as long as the ranges."""
    made = _of_key_ranges.setdefault(ranges.end, {})
    key = make, id(ranges.first), sizes
    if key not in made:
        made[key] = ranges.first, make(ranges, *sizes)  # with `first`, because its id counts
    return made[key][1]


def _seen_keys(ranges: KeyRanges, keys: int) -> Tensor:
    """The keys that any row sees, bool [samples, keys]: those before which more ranges start than end."""
    after = torch.arange(1, keys + 1, dtype=torch.int32, device=ranges.end.device)
    at = after.expand(len(ranges.first), -1).contiguous()
    starts, ends = (torch.searchsorted(bound.contiguous(), at) for bound in ranges)
    return starts > ends


def _rows_seeing(ranges: KeyRanges, keys: int, tile: int) -> Tensor:
    """The rows that see each tile of keys, int32 [samples, 4, tiles].

    The four values: the first row whose range ends beyond the tile's first key, the first row whose range contains the
    tile's end, the number of rows whose range starts at or before its first key, and the number of rows whose range
    starts before its end. Bounds never decrease. So rows [0] to [3] see some of the tile, and rows [1] to [2] all of
    it.
    """
    starts = torch.arange(0, keys, tile, dtype=torch.int32, device=ranges.end.device)
    bounds = torch.stack((ranges.end, ranges.first))
    sought = torch.cat((starts + 1, starts + tile)).expand(*bounds.shape[:2], -1).contiguous()
    end, first = torch.searchsorted(bounds, sought, out_int32=True).unflatten(-1, (2, -1))
    return torch.cat((end, first), 1)
