"""The class that vLLM loads (`kv_connector_module_path`) to decode what our ranks prefilled.

vLLM makes one object in its scheduler and one in each worker. The scheduler's says which prompts have rows elsewhere,
and what a worker is to load into which blocks. A worker's loads them in threads, while other requests run.
"""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from .counters import PullCounts, PullMetrics
from .identity import difference, identity
from .pull import Pull, give_back
from .wire import Ticket, WireError, digest_of_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

CHECKED = ("0.32.0",)  # releases of vLLM that tests/vllm ran with
SILENCE = 30.0  # seconds
_LOADS = 8  # at a time, in each worker
log = init_logger(f"vllm.{__name__}")  # vLLM configures its own loggers only


@dataclass(frozen=True)
class Load:
    """What a worker loads for a request: rows from position `first` on, into `blocks`, which begin at position 0."""

    request: str
    ticket: Ticket
    first: int
    blocks: tuple[int, ...]


@dataclass
class Loads(KVConnectorMetadata):
    """What the scheduler tells the workers in a step."""

    loads: list[Load] = field(default_factory=list)


class ContextParallelConnector(KVConnectorBase_V1):
    """Loads prefilled rows of keys and values from the ranks of a context-parallel server.

    A request brings a ticket in its `kv_transfer_params`. vLLM computes the prompt itself if the ticket is of another
    model or prompt, with one warning. `kv_connector_extra_config` may have `silence_seconds`: so long a rank may send
    nothing, 30 by default.

    Raises:
        ValueError: this release of vLLM was not tested, or the configuration needs rows that no rank has.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = _Scheduler(_identity(vllm_config))
        else:
            self._worker = _Worker(vllm_config)

    # -- the scheduler's object --------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> Loads:
        return self._scheduler.loads_of_step()

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, None]:
        self._scheduler.finished(request)
        return False, None

    # -- a worker's object -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        for load in loads.loads:
            self._worker.begin(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All loads are asynchronous: a request is scheduled when its rows are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        return None, self._worker.finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_lost_blocks()

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker.shutdown()
        else:
            self._scheduler.shutdown()

    # -- metrics -----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> PullCounts | None:
        return self._worker.take_counts() if self.role is KVConnectorRole.WORKER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PullCounts:
        return PullCounts(data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> PullMetrics:
        return PullMetrics(*given)


def _check(config: "VllmConfig", caches: "KVCacheConfig") -> None:
    """Refuse what was not tested, and what rows of a plain decoder with full attention do not serve."""
    version = vllm.__version__.partition("+")[0]
    tested = ", ".join(CHECKED)
    parallel, model = config.parallel_config, config.model_config
    ways = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    wrong = {
        f"vLLM {version} was not tested; use {tested}": version not in CHECKED,
        **{f"{way}: give 1": getattr(parallel, way, 1) != 1 for way in ways},
        "quantized weights have other keys and values than ours": model.quantization is not None,
        "kv_cache_dtype: give auto": config.cache_config.cache_dtype not in ("auto", str(model.dtype)[6:]),
        "speculative decoding needs keys and values of a draft model": config.speculative_config is not None,
        "all layers must have full attention": len(caches.kv_cache_groups) != 1 or model.get_sliding_window(),
        "load_format: give auto or safetensors": config.load_config.load_format not in ("auto", "safetensors"),
    }
    for why, is_so in wrong.items():
        if is_so:
            raise ValueError(f"ContextParallelConnector: {why}")


class _Scheduler:
    """The part of the connector in vLLM's scheduler. Tickets that it does not use are given back.

    A request is asked once: after a failure or a preemption, vLLM computes its prompt.

    Args:
        model: the `identity` of vLLM's model.
    """

    def __init__(self, model: dict[str, Any]) -> None:
        self._model = model
        self._asked = set[str]()
        self._loads = list[Load]()
        self._threads = ThreadPoolExecutor(_LOADS, "refused tickets")

    def matched(self, request: "Request", cached: int) -> tuple[int, bool]:
        """How many tokens are loaded beyond the `cached` ones, and whether asynchronously."""
        if request.request_id in self._asked or not request.kv_transfer_params:
            return 0, False
        if not (ticket := self._ticket(request)):
            self._asked.add(request.request_id)
            return 0, False
        return ticket.tokens - cached, True

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external: int) -> None:
        if not external or request.request_id in self._asked:
            return
        ticket = Ticket.of(request.kv_transfer_params)
        assert ticket
        self._asked.add(request.request_id)
        self._loads.append(Load(request.request_id, ticket, ticket.tokens - external, tuple(blocks.get_block_ids()[0])))

    def loads_of_step(self) -> Loads:
        loads, self._loads = self._loads, []
        return Loads(loads)

    def finished(self, request: "Request") -> None:
        """A request has ended; if it was never asked, its client left while it waited."""
        if request.request_id in self._asked:
            self._asked.remove(request.request_id)
            return
        with suppress(WireError):
            if ticket := Ticket.of(request.kv_transfer_params):
                self._give_back(ticket, "the request has ended")

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ticket(self, request: "Request") -> Ticket | None:
        """The ticket of a request, if its rows are those that this vLLM would compute; else one warning."""
        ticket = None
        try:
            ticket = Ticket.of(request.kv_transfer_params)
            if ticket:
                self._check(ticket, request)
            return ticket
        except WireError as error:
            log.warning("Request %s: computed here, because %s", request.request_id, error)
            if ticket:
                self._give_back(ticket, str(error))
            return None

    def _give_back(self, ticket: Ticket, why: str) -> None:
        self._threads.submit(give_back, ticket, why)

    def _check(self, ticket: Ticket, request: "Request") -> None:
        """Raises WireError if the rows of a ticket are of another prompt or model."""
        tokens = request.prompt_token_ids
        if tokens is None or len(tokens) != ticket.tokens or digest_of_tokens(tokens) != ticket.tokens_digest:
            raise WireError(f"the ticket is of another prompt, of {ticket.tokens} tokens; do both tokenize alike?")
        if request.lora_request or request.mm_features:
            raise WireError("the request has an adapter or images, and its ticket has not")
        if other := difference(self._model, ticket.model):
            raise WireError(f"the ticket is of another model ({other})")


def _identity(config: "VllmConfig") -> dict[str, Any]:
    """The identity of vLLM's model; it reads all weights once. Raises ValueError if their folder has none."""
    model = config.model_config
    folder = Path(model.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    return identity(model.hf_text_config, str(model.dtype).removeprefix("torch."), folder)


class _Worker:
    """The part of the connector in one of vLLM's workers."""

    def __init__(self, config: "VllmConfig") -> None:
        self._config = config
        extra = config.kv_transfer_config.kv_connector_extra_config if config.kv_transfer_config else {}
        self._silence = float(extra.get("silence_seconds", SILENCE))
        self._layers = list[Any]()
        self._threads = ThreadPoolExecutor(_LOADS, "rows")
        self._lock = threading.Lock()
        self._pulls = dict[str, Pull]()
        self._done = set[str]()
        self._lost_blocks = set[int]()
        self._counts = PullCounts()

    def register(self, caches: dict[str, Tensor]) -> None:
        """Find the attention layers of these caches, in the order of the model."""
        layers = self._config.compilation_config.static_forward_context
        self._layers = [layers[name] for name in sorted(caches, key=extract_layer_index)]
        for layer in self._layers:
            if not hasattr(layer.impl, "do_kv_cache_update"):
                kind = type(layer.impl).__name__
                raise ValueError(f"ContextParallelConnector: {kind} cannot write rows; choose another backend")

    def begin(self, load: Load) -> None:
        """Load the rows of a request in a thread."""
        workers = self._config.parallel_config.tensor_parallel_size
        rank = get_tensor_model_parallel_rank()
        groups = load.ticket.model["num_key_value_heads"]
        first_head = rank * groups // workers
        heads = (first_head, first_head + max(1, groups // workers))
        pull = Pull(load.ticket, load.first, heads, self._writer(load), (rank, workers), self._silence)
        with self._lock:
            self._pulls[load.request] = pull
        self._threads.submit(self._run, load, pull)

    def finished(self, ended: Iterable[str]) -> set[str]:
        """The requests whose loads have ended since the last call. Loads of requests that have ended are given up."""
        with self._lock:
            given_up = [self._pulls[request] for request in ended if request in self._pulls]
            done, self._done = self._done, set()
        for pull in given_up:
            pull.cancel("the request has ended")
        return done

    def take_lost_blocks(self) -> set[int]:
        """The blocks of ended loads with rows that did not come."""
        with self._lock:
            lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    def take_counts(self) -> PullCounts | None:
        with self._lock:
            if self._counts.is_empty():
                return None
            counts, self._counts = self._counts, PullCounts()
        return counts

    def shutdown(self) -> None:
        with self._lock:
            pulls = [*self._pulls.values()]
        for pull in pulls:
            pull.cancel("vLLM ends")
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, load: Load, pull: Pull) -> None:
        pull.run()
        missing = pull.first_missing()
        if pull.report.error:
            log.warning(
                "Request %s: %d of %d rows came (%s)",
                load.request,
                pull.report.rows,
                load.ticket.tokens - load.first,
                pull.report.error,
            )
        lost = load.blocks[missing // self._block_size :] if missing < load.ticket.tokens else ()
        with self._lock:
            del self._pulls[load.request]
            self._lost_blocks.update(lost)
            self._counts.add(pull.report)
            self._done.add(load.request)

    @property
    def _block_size(self) -> int:
        return self._config.cache_config.block_size

    def _writer(self, load: Load) -> Any:
        """What writes rows into the cache: each backend knows its own layout."""
        blocks = torch.tensor(load.blocks)
        size = self._block_size

        @torch.inference_mode()
        def write(layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
            slots = blocks[positions // size] * size + positions % size
            attention = self._layers[layer]
            cache = attention.kv_cache
            with _own_stream(cache):
                rows = [x.to(cache.device) for x in (keys, values, slots)]
                attention.impl.do_kv_cache_update(attention, rows[0], rows[1], cache, rows[2])

        return write


@contextmanager
def _own_stream(cache: Tensor) -> Iterator[None]:
    """On a GPU, a stream of this thread, whose work has ended at the end of the block."""
    if not cache.is_cuda:
        yield
        return
    stream = torch.cuda.Stream(cache.device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
