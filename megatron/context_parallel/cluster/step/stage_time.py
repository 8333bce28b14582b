"""The time of a rank of one pipeline stage in an iteration, by kind."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.cluster.simulate.collectives import Rate, all_to_all, exchange, ring
from megatron.context_parallel.errors import UsageError

from . import saved_bytes
from .attention_pass import Attention, attention_seconds
from .layer_time import KernelTime, LayerTime
from .mlp_chunks import mlp_chunks, recomputed_anyway
from .model_shape import ModelShape
from .train_config import TrainConfig

# The kinds of time of an iteration, in the order of tables.
ATTENTION = "attention"
EXPOSED = "attention's exposed communication"
PRODUCTS = "products of matrices"
NORMS = "norms and the like"
LOGITS = "logits and loss"
LAUNCHES = "kernel launches"
TENSOR = "tensor-parallel traffic"
EXPERTS = "expert-parallel traffic"
PIPELINE = "pipeline traffic"
BUBBLE = "pipeline bubble"
HOST = "host memory, exposed"
DATA_PARALLEL = "gradients and weights, exposed"
GRADIENT_SUMS = "sums of gradients"
OPTIMIZER = "optimizer"
FIXED = "fixed cost"
KINDS = (
    ATTENTION, EXPOSED, PRODUCTS, NORMS, LOGITS, LAUNCHES, TENSOR, EXPERTS, PIPELINE, BUBBLE, HOST, DATA_PARALLEL,
    GRADIENT_SUMS, OPTIMIZER, FIXED,
)  # fmt: skip
MLP = ("fc1", "activation", "fc2")
# What follows is from NVIDIA's configurations for MLPerf (`conf/tp_overlap`).
SPLITS = 4  # parts of a product whose sum runs beside it (`num_splits`)
MULTIPROCESSORS = 132  # of an H100
# Of them, those that tensor-parallel traffic beside a product takes (`num_sm`). Backward, the products for gradients of
# inputs and of weights are both beside such traffic in "qkv" and "fc1".
TAKEN_FORWARD: dict[str, tuple[int, ...]] = {"qkv": (1,), "proj": (24,), "fc1": (1,), "fc2": (4,)}
TAKEN_BACKWARD: dict[str, tuple[int, ...]] = {"qkv": (4, 8), "proj": (1,), "fc1": (2, 4), "fc2": (1,)}
SecondsByKind = dict[str, float]
AttentionTime = Callable[[ModelShape, TrainConfig, Cluster, bool], Attention]  # of a layer and micro batch; backward?


def sum_by_kind(several: Iterable[SecondsByKind]) -> SecondsByKind:
    """Seconds by kind, added up."""
    result: SecondsByKind = {}
    for parts in several:
        for name, seconds in parts.items():
            result[name] = result.get(name, 0.0) + seconds
    return result


class StageTime:
    """A pipeline stage.

    Attributes:
        micro_batch: seconds of each micro batch, forward and backward.
        filling: seconds that an interleaved pipeline waits for its traffic while it fills and empties.
        once: seconds of an iteration beside its micro batches.
    """

    def __init__(
        self,
        model: ModelShape,
        run: TrainConfig,
        cluster: Cluster,
        stage: int,
        attention: AttentionTime = attention_seconds,
    ) -> None:
        self.model, self.run, self.cluster, self.attention = model, run, cluster, attention
        cores = min(run.world_size, cluster.shared_cores or run.world_size)
        self.time = LayerTime(model, run, cluster.device, run.world_size / cores)
        self.layers = model.num_layers // run.pipeline_model_parallel_size
        self.first, self.last = stage == 0, stage == run.pipeline_model_parallel_size - 1
        forward, backward = self._pass(False), self._pass(True)
        self.micro_batch = sum_by_kind((forward, backward))
        self.filling = sum(self._filling(sum(parts.values()) - parts[PIPELINE]) for parts in (forward, backward))
        self.once = self._once(stage, forward, backward)

    def _once(self, stage: int, forward: SecondsByKind, backward: SecondsByKind) -> SecondsByKind:
        """What a rank does once in an iteration: its part of the gradients, the weights and the optimizer."""
        model, run = self.model, self.run
        sizes = stage, run.pipeline_model_parallel_size, run.tensor_model_parallel_size
        parameters = model.parameters_on_stage(*sizes, model.expert_model_parallel_size)
        hiding = (parts[PRODUCTS] + parts[NORMS] for parts in (forward, backward))
        sharding = self._gradients_and_weights(parameters, *hiding) + self._tied_embedding()
        sums = (run.micro_batches - 1) * self.time.gradient_sum(parameters // run.shards("grads"))
        if (shards := run.shards("optim")) > 1:  # all experts are
            parameters = model.parameters_on_stage(*sizes)
        optimizer = self.time.optimizer(parameters // shards) + self.time.weight_casts(self.layers)
        fixed = self.cluster.iteration_ms * 1e-3
        return {DATA_PARALLEL: sharding, GRADIENT_SUMS: sums, OPTIMIZER: optimizer, FIXED: fixed}

    def _pass(self, backward: bool) -> SecondsByKind:
        several = [self._layers(self.layers, backward), self._attention(self.layers, backward)]
        if backward:
            several += self._recomputed()
            if mlp_chunks(self.model, self.run) > 1 and not recomputed_anyway(self.run):
                several.append(self._mlp_again())
        several.append({HOST: self._offloading(backward, sum(sum_by_kind(several).values()))})
        if self.first:
            several.append(self._kernels(self.time.embedding(backward)))
        if self.last:
            logits = self.time.logits(backward)
            several += [{LOGITS: logits.gemm + logits.moving}, self._kernels(KernelTime(0.0, 0.0, logits.kernels))]
        several.append({TENSOR: self._tensor_of_ends(backward)})
        parts = sum_by_kind(several)
        return parts | {PIPELINE: self._pipeline(sum(parts.values()))}

    def _kernels(self, work: KernelTime) -> SecondsByKind:
        launches = work.kernels * self.cluster.device.kernel_us * 1e-6
        return {PRODUCTS: work.gemm, NORMS: work.moving, LAUNCHES: launches}

    def _layers(self, count: int, backward: bool) -> SecondsByKind:
        parts = self._kernels(self.time.layer(backward))
        parts[PRODUCTS] += self._slowdown_of_products(backward, *self.time.products)
        parts |= {TENSOR: self._tensor_of_layer(backward), EXPERTS: self._experts_of_layer()}
        return {name: count * seconds for name, seconds in parts.items()}

    def _attention(self, count: int, backward: bool) -> SecondsByKind:
        """Of `count` layers, as many have no window as in the whole model."""
        whole = count * self.model.full_layers / self.model.num_layers
        kinds = [(self.model, whole)] if whole else []
        kinds += [(replace(self.model, full_layers=0), count - whole)] if whole < count else []
        several = list[SecondsByKind]()
        for model, layers in kinds:
            seconds = self.attention(model, self.run, self.cluster, backward)
            several.append({ATTENTION: layers * seconds.compute, EXPOSED: layers * seconds.exposed})
        return sum_by_kind(several)

    @property
    def _recomputed_layers(self) -> int:
        """Layers that full recomputation computes again."""
        if self.run.recompute_method == "uniform":
            return self.layers
        return min(self.layers, self.run.virtual_stages * (self.run.recompute_num_layers or 0))

    def _recomputed(self) -> list[SecondsByKind]:
        """Forward passes that the backward pass repeats; where attention's output is kept, only its swap of heads."""
        run = self.run
        if run.recompute_granularity != "full":
            return [self._computed_again(module) for module in run.computed_again]
        count = self._recomputed_layers
        layers = self._forward(
            count, *(part for part in self.time.forward_parts if part not in run.recompute_whitelist)
        )
        if "core_attention" in run.recompute_whitelist:
            swap = self.attention(self.model, run, self.cluster, False).swap
            return [layers, {EXPOSED: count * swap}]
        return [layers, self._attention(count, False)]

    def _computed_again(self, module: str) -> SecondsByKind:
        """A module of all layers once more, by its name in `--recompute-modules`."""
        if module == "core_attn":
            return self._attention(self.layers, False)
        if module == "layernorm":
            return self._forward(self.layers, "norms")
        if module == "mlp":
            return self._mlp_again()
        if module == "shared_experts" and "moe" in self.run.computed_again:
            return {}  # they are inside
        if module == "moe":
            return self._forward(self.layers, "router", "dispatch", *MLP)
        shared = (self.model.moe_shared_expert_intermediate_size or 0) / self.model.mlp_width
        return self._forward(self.layers * shared, *MLP)

    def _mlp_again(self) -> SecondsByKind:
        """The MLPs of all layers once more. This ends with their last product, before its sum over ranks."""
        parts = self._forward(self.layers, *MLP)
        return parts | {TENSOR: self.layers * self._tensor_of_products("fc1")}

    def _forward(self, count: float, *names: str) -> SecondsByKind:
        """Some parts of the forward pass of `count` layers (`LayerTime.forward_parts`)."""
        parts = self._kernels(self.time.forward(*names)) | {TENSOR: self._tensor_of_products(*names)}
        parts[PRODUCTS] += self._slowdown_of_products(False, *names)
        if "dispatch" in names:
            parts[EXPERTS] = self._experts_of_layer()
        return {name: count * seconds for name, seconds in parts.items()}

    # -- traffic -----------------------------------------------------------------------------------------------

    def _ring(self, *names: str) -> Rate:
        return ring(self.cluster, tuple(self.run.groups(*names)))

    def _hidden_states(self) -> int:
        return self.run.tokens * self.model.hidden_size * self.run.itemsize

    def _tensor_of_layer(self, backward: bool) -> float:
        """Seconds that a layer waits for tensor-parallel ranks; an all-reduce is two rings.

        The backward pass sums gradients of inputs while it computes those of weights. With sequence parallelism it also
        gathers the inputs, while it computes the gradients of inputs.
        """
        if not backward:
            return self._tensor_of_products(*self.time.products)
        if self.run.tensor_model_parallel_size == 1:
            return 0.0
        one = self._ring("tensor").seconds(self._hidden_states())
        products = self.time.backward_products
        beside = [products[name] for name in ("qkv", "fc1")]
        if self.run.sequence_parallel:
            outputs = (products[name] for name in ("proj", "fc2"))  # their gradients are gathered
            gathers = sum(self._exposed_traffic(product, one) for product in outputs)
            return gathers + 2 * sum(max(0.0, one - product) for product in beside)
        return sum(max(0.0, 2 * one - product) for product in beside)

    def _tensor_of_products(self, *names: str) -> float:
        """The same of products in the forward pass: hidden states are gathered before, or summed after them."""
        if self.run.tensor_model_parallel_size == 1:
            return 0.0
        one = self._ring("tensor").seconds(self._hidden_states())
        before, after = (one, one) if self.run.sequence_parallel else (0.0, 2 * one)
        products = {name: seconds for name, seconds in self.time.products.items() if name in names}
        gathers = sum(self._exposed_traffic(products[name], before) for name in ("qkv", "fc1") if name in products)
        summed = [products[name] for name in ("proj", "fc2") if name in products]
        return gathers + sum(self._exposed_traffic(product, after, after / SPLITS) for product in summed)

    def _exposed_traffic(self, product: float, seconds: float, last: float = 0.0) -> float:
        """Seconds of its tensor-parallel traffic that a product does not hide: of a sum at least the `last` part."""
        if not self.run.tp_comm_overlap:
            return seconds
        return max(last, seconds - product)

    def _slowdown_of_products(self, backward: bool, *names: str) -> float:
        """Seconds that products of a layer take longer: traffic beside them takes multiprocessors."""
        if self.run.tensor_model_parallel_size == 1 or not self.run.tp_comm_overlap:
            return 0.0
        taken, products = TAKEN_FORWARD, self.time.products
        if backward:
            taken, products = TAKEN_BACKWARD, self.time.backward_products
        longer = 0.0
        for name, counts in taken.items():
            if name in names:
                longer += products[name] * sum(count / (MULTIPROCESSORS - count) for count in counts)
        return longer

    def _experts_of_layer(self) -> float:
        """Seconds in which tokens go to the ranks of their experts and come back, in either pass; nothing hides it."""
        over = min(self.model.expert_model_parallel_size, self.run.sharers)
        if over == 1:
            return 0.0
        sharers = self.run.groups("context", "data")
        groups = tuple(part for group in sharers for part in _split(group, len(group) // over))
        if self.run.moe_token_dispatcher_type == "allgather":  # every rank gets the tokens of all
            return 2 * ring(self.cluster, groups).seconds(over * self._hidden_states())
        return 2 * all_to_all(self.cluster, groups).seconds(self.model.moe_router_topk * self._hidden_states())

    def _tensor_of_ends(self, backward: bool) -> float:
        """The same of embedding, logits and loss."""
        if self.run.tensor_model_parallel_size == 1:
            return 0.0
        rate = self._ring("tensor")
        whole = 1 if self.run.sequence_parallel else 2
        one = rate.seconds(self._hidden_states())
        seconds = 0.0
        if self.first:
            seconds += one * (whole if not backward else 2 - whole)
        if self.last:
            seconds += one * (2 - whole if not backward else whole)
            seconds += 0.0 if backward else 3 * 2 * rate.seconds(4 * self.run.tokens)
        return seconds

    def _pipeline(self, busy: float) -> float:
        """Seconds of a pass that wait for the next stage. An interleaved pipeline sends while it computes."""
        seconds = self.run.virtual_stages * self._to_next_stage()
        return seconds if self.run.virtual_stages == 1 else max(0.0, seconds - busy)

    def _filling(self, busy: float) -> float:
        """Seconds of all passes that wait for the next stage while an interleaved pipeline fills, or empties.

        Megatron's schedule (`overlap_p2p_comm_warmup_flush` off) then sends after each part of a stage, and computes
        nothing meanwhile. The last stage has the longest way: the first micro batch reaches it after stages - 1
        messages, and it computes all but one of its parts of as many micro batches as there are stages before it
        computes both ways.
        """
        run = self.run
        if run.virtual_stages == 1:
            return 0.0
        messages = run.virtual_stages * run.pipeline_model_parallel_size - 1
        return messages * min(self._to_next_stage(), busy / run.virtual_stages)  # the rest always counts

    def _to_next_stage(self) -> float:
        """Seconds of the messages from each stage to the next, all at once."""
        run = self.run
        if run.pipeline_model_parallel_size == 1:
            return 0.0
        stride = run.world_size // run.pipeline_model_parallel_size
        pairs = tuple((rank, rank + stride) for rank in range(run.world_size - stride))
        each = self._hidden_states() // (run.tensor_model_parallel_size if run.sequence_parallel else 1)
        return exchange(self.cluster, pairs).seconds(each)

    def _tied_embedding(self) -> float:
        """Seconds in which the first and the last stage add up the gradients of the embedding that they share."""
        model, run = self.model, self.run
        if model.untie_embeddings_and_output_weights or run.pipeline_model_parallel_size == 1:
            return 0.0
        last = run.world_size - run.world_size // run.pipeline_model_parallel_size
        rate = ring(self.cluster, tuple((rank, rank + last) for rank in range(run.world_size - last)))
        size = model.padded_vocab_size * model.hidden_size // run.tensor_model_parallel_size
        return 2 * rate.seconds(run.grad_itemsize * size)

    def _offloading(self, backward: bool, busy: float) -> float:
        """Seconds of a pass that wait for copies to host memory, or back; its layers hide them for `busy` seconds.

        What the first layer of the backward pass needs, nothing hides.
        """
        run = self.run
        if not (run.offload_checkpoints or run.offload_kept or run.offload_modules):
            return 0.0
        if (rate := self.cluster.device.host_GB_s) is None:
            why = f"{self.cluster.device.name} has no device.host_GB_s; give it in the cluster's file, such as 64"
            raise UsageError(f"offloading of activations: {why}")
        group = (run.recompute_num_layers or 1) if run.recompute_method == "uniform" else 1
        first = saved_bytes.fetched_ahead(self.model, run, group)
        size = self._recomputed_layers / group * first
        if run.offload_modules:  # without full recomputation; those of the last layer stay on the device
            first = saved_bytes.offloaded(self.model, run)[1]
            size = (self.layers - 1) * first
        return max(size / (1e9 * rate) - busy, first / (1e9 * rate) if backward else 0.0)

    def _gradients_and_weights(self, parameters: int, forward: float, backward: float) -> float:
        """Seconds of an iteration that wait for gradients and weights of data and context ranks.

        Products and norms hide what overlaps, for `forward` and `backward` seconds of a micro batch. Attention does
        not, because its messages use the links. What one layer sends is never hidden. Of several copies of a sharded
        state, each gathers by itself, and adds up its gradients before it adds those of the others.
        """
        run = self.run
        if run.sharers == 1:
            return 0.0
        copies = run.num_distributed_optimizer_instances
        sharers = run.groups("context", "data")
        rate = ring(self.cluster, tuple(part for group in sharers for part in _split(group, copies)))
        gather = rate.seconds(run.gathered_itemsize * parameters) if run.shards("optim") > 1 else 0.0
        reduce = rate.seconds(run.grad_itemsize * parameters) * (1 if gather else 2)
        if copies > 1:  # an all-reduce of each shard
            across = tuple(same for group in sharers for same in zip(*_split(group, copies), strict=True))
            reduce += 2 * ring(self.cluster, across).seconds(run.grad_itemsize * parameters / run.shards("optim"))

        def exposed(busy: float, gathered: float, reduced: float) -> float:
            both = ((gathered, run.overlap_param_gather), (reduced, run.overlap_grad_reduce))
            hidden = sum(seconds for seconds, overlaps in both if overlaps)
            return gathered + reduced - hidden + max(hidden - busy, hidden / self.layers)

        if run.shards("params") > 1:  # no rank keeps all weights: they are gathered for every pass
            return run.micro_batches * (exposed(forward, gather, 0.0) + exposed(backward, gather, reduce))
        reductions = run.micro_batches if run.shards("grads") > 1 else 1
        return exposed(forward, gather, 0.0) + reductions * exposed(backward, 0.0, reduce)


def _split(group: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """`count` equal parts of a group, of neighbours."""
    size = len(group) // count
    return [group[start : start + size] for start in range(0, len(group), size)]
