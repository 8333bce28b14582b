"""Checks that the libraries still are as the files of `patches/` assume.

A failure names a file of `patches/` and a place in a library that has changed. Read both and correct the file. Then
record here what the library has now, and in `CHECKED` its release. Places are looked up in sources. So replacements at
run time are not seen, and no library is imported that is slow to import.
"""

import ast
import hashlib
import importlib.util
import inspect
import sys
from functools import cache
from importlib import metadata
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import dataloader

from megatron.context_parallel import patches
from megatron.context_parallel.patches import (
    megatron_lm,
    release_of,
    torch_all_gather,
    torch_coalescing,
    torch_cpu_attention,
    torch_data_workers,
    torch_dispatcher,
    torch_fake_tensors,
    torch_foreach,
    torch_packed_linear,
    torch_process_groups,
    torch_write_counter,
    waiting_frames,
)
from tests.support.releases import installed

FOLDER = Path(patches.__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
_C10D = "torch/distributed/distributed_c10d.py"
_CORE = "megatron/core"
_DIST_CHECKPOINTING = f"{_CORE}/dist_checkpointing"
_WRITER = f"{_DIST_CHECKPOINTING}/strategies/filesystem_async.py"
_BUFFERS = f"{_CORE}/distributed/param_and_grad_buffer.py"
_PIPELINE = f"{_CORE}/pipeline_parallel/p2p_communication.py"
_EMBEDDINGS = f"{_CORE}/models/common/embeddings"
_MASKS = "transformers/masking_utils.py"
_DISPATCH = "diffusers/models/attention_dispatch.py"

TORCH = release_of(torch.__version__)
CORE = installed("megatron-core")


def by_release(known: dict[tuple[int, int], str]) -> str:
    """Of what a release of megatron-core brought, that of the installed one."""
    return known[max(release for release in known if release <= CORE)]


# Names that some releases of megatron-core have.
SAVE_COMMON = "TorchCommonSaveStrategy.save_common" if CORE == (0, 16) else "save_common"
PACKED_BATCHES = {}
if CORE < (0, 18):
    PACKED_BATCHES = {
        "get_thd_batch_on_this_cp_rank": "56da9737cb3d",
        "get_batch_on_this_hybrid_cp_rank": "6dae5a7597c1",
    }
elif CORE == (0, 18):
    PACKED_BATCHES = {"get_sft_batch_on_this_cp_rank": "dc11548297d8"}
PACKED_MASKS = {"create_causal_mask": "6c0c78518ffb"}
if installed("transformers") < (5, 24):
    PACKED_MASKS = {"packed_sequence_compatibility_function": "ef1a74a58516"}
Table = dict[str, dict[str, dict[str, str]]]  # by our file, the file of a library, and the name there

# What is called, or replaced by something that takes the same: parameters of a function, the value of a name, where a
# name is imported from.
SHAPES: Table = {
    "torch_process_groups": {
        _C10D: {
            "_get_default_store": "",
            "_new_process_group_helper": (
                "group_size group_rank global_ranks_in_group backend store "
                "group_name backend_options timeout pg_tag device_id group_desc"
                + (" enable_reconfigure" if TORCH >= (2, 14) else "")
            ),
            "_World.pg_group_ranks": "self",
            "_world": "_world = _World()",
        },
    },
    "torch_coalescing": {_C10D: {"_coalescing_manager": "group device async_ops"}},
    "torch_checkpoint_metadata": {
        "torch/distributed/checkpoint/filesystem.py": {"FileSystemReader._get_metadata_path": "self rank"}
    },
    "waiting_frames": {
        _C10D: {
            "all_reduce": "tensor op group async_op",
            "all_gather": "tensor_list tensor group async_op",
            "all_gather_object": "object_list obj group" + (" weights_only" if TORCH >= (2, 14) else ""),
            "broadcast": "tensor src group async_op group_src",
            "barrier": "group async_op device_ids" + (" timeout" if TORCH >= (2, 12) else ""),
            "reduce_scatter_tensor": "output input op group async_op",
            "all_gather_into_tensor": "output_tensor input_tensor group async_op",
            "all_to_all_single": "output input output_split_sizes input_split_sizes group async_op",
        },
        _BUFFERS: {
            "_ParamAndGradBucketGroup.data_parallel_group": "self.data_parallel_group = collective_group",
            "_ParamAndGradBucketGroup.finish_grad_sync": "self force_all_reduce",
        },
        _PIPELINE: {
            "P2PCommunicator._communicate": (
                "self tensor_send_next tensor_send_prev recv_prev recv_next tensor_shape wait_on_reqs"
            ),
            "P2PCommunicator._communicate.next_rank": "next_rank = self.next_rank",
            "P2PCommunicator._communicate.prev_rank": "prev_rank = self.prev_rank",
        },
    },
    "torch_hooks": {
        "torch/nn/modules/module.py": {
            "Module._forward_hooks": "_forward_hooks: dict[int, Callable]",
            "Module._forward_pre_hooks": "_forward_pre_hooks: dict[int, Callable]",
        },
    },
    "torch_gpu_sleep": {"torch/cuda/__init__.py": {"_sleep": "cycles"}},
    "cpu_host": {
        "torch/utils/_device.py": {"_device_constructors": ""},
        "torch/cuda/__init__.py": {
            "current_device": "",
            "synchronize": "device",
            "current_stream": "device",
            "default_stream": "device",
            "stream": "stream",
        },
        "torch/cuda/memory.py": {"empty_cache": ""},
        "torch/cuda/streams.py": {
            "Stream": "class",
            "Event": "class",
        },
        "torch/cuda/random.py": {
            "manual_seed": "seed",
            "get_rng_state": "device",
            "set_rng_state": "new_state device",
        },
        f"{_CORE}/distributed/fsdp/mcore_fsdp_adapter.py": {"DeviceMesh": "from torch.distributed"},
        f"{_CORE}/transformer/moe/token_dispatcher.py": {
            "maybe_move_tensor_to_cpu": "from megatron.core.transformer.moe.moe_utils"
        },
    },
    "megatron_checkpoint_writer": {
        f"{_DIST_CHECKPOINTING}/strategies/common.py": {
            SAVE_COMMON: "self " * (CORE == (0, 16)) + "common_state_dict checkpoint_dir"
        },
        _WRITER: {
            "FileSystemWriterAsync.prepare_local_plan": "self plan",
            "FileSystemWriterAsync.finish": "self metadata results",
            "_results_queue": "_results_queue = None",
        },
        f"{_DIST_CHECKPOINTING}/serialization.py": {
            "save_config": "from .core",
            **({"save_common": "from .strategies.common"} if CORE in ((0, 17), (0, 18)) else {}),
        },
    },
    "megatron_data_parallel": {f"{_CORE}/distributed/data_parallel_base.py": {"_BaseDataParallel": "class"}},
    "megatron_gradient_norm": {
        f"{_CORE}/optimizer/clip_grads.py": {"l2_norm_impl": "l2_norm_impl = multi_tensor_l2norm"},
        f"{_CORE}/utils.py": {"local_multi_tensor_l2_norm": "chunk_size noop_flag tensor_lists per_tensor *args"},
    },
    "megatron_norms": {
        f"{_CORE}/tensor_parallel/random.py": {
            "CheckpointWithoutOutput.__init__": "self fp8",
            "CheckpointWithoutOutput.__init__.fp8": "self.fp8 = fp8 is not None",
        },
    },
    "megatron_checkpoint": {
        f"{_CORE}/tensor_parallel/random.py": {"checkpoint": "function distribute_saved_activations *args"},
    },
    "megatron_index_file": {
        f"{_CORE}/datasets/indexed_dataset.py": {"_INDEX_HEADER": "_INDEX_HEADER = b'MMIDIDX\\x00\\x00'"}
    },
    "megatron_lm": {
        f"{_EMBEDDINGS}/rotary_pos_embedding.py": {
            "get_pos_emb_on_this_cp_rank": "from megatron.core.models.common.embeddings.rope_utils"
        },
        f"{_EMBEDDINGS}/yarn_rotary_pos_embedding.py": {
            "get_pos_emb_on_this_cp_rank": "from megatron.core.models.common.embeddings.rope_utils"
        },
        f"{_CORE}/models/gpt/gpt_model.py": {
            "GPTModel.forward": "self input_ids position_ids attention_mask decoder_input labels inference_context "
            "packed_seq_params extra_block_kwargs runtime_gather_output inference_params loss_mask padding_mask"
            + by_release(
                {(0, 16): "", (0, 17): " is_spec_decode", (0, 18): " output_processor output_processor_context"}
            )
        },
    },
    "transformers": {
        "transformers/configuration_utils.py": {"PreTrainedConfig._attn_implementation": "self"},
        "transformers/modeling_utils.py": {"PreTrainedModel._is_stateful": "_is_stateful: bool = False"},
        "transformers/trainer.py": {"Trainer._prepare_context_parallel_inputs": "self model inputs"},
    },
    "accelerate": {
        "torch/nn/modules/module.py": {
            "Module._forward_pre_hooks": "_forward_pre_hooks: dict[int, Callable]",
            "Module._forward_pre_hooks_with_kwargs": "_forward_pre_hooks_with_kwargs: dict[int, bool]",
        },
    },
    "diffusers": {
        "diffusers/hooks/context_parallel.py": {"apply_context_parallel": "module parallel_config plan"},
        "diffusers/models/modeling_utils.py": {
            "ModelMixin._cp_plan": "_cp_plan = None",
            "ModelMixin._parallel_config": "_parallel_config = None",
        },
        "diffusers/models/_modeling_parallel.py": {
            "ContextParallelConfig.ring_degree": "ring_degree: int | None = None",
            "ContextParallelConfig._mesh": "_mesh: torch.distributed.device_mesh.DeviceMesh = None",
            "ContextParallelConfig._flattened_mesh": "_flattened_mesh: torch.distributed.device_mesh.DeviceMesh = None",
        },
        "diffusers/models/transformers/transformer_flux.py": {
            "FluxAttnProcessor._attention_backend": "_attention_backend = None"
        },
    },
    "torchtitan": {
        "torchtitan/trainer.py": {"prepare_context_parallel_input": "from torchtitan.distributed.context_parallel"},
        "torchtitan/components/validate.py": {
            "prepare_context_parallel_input": "from torchtitan.distributed.context_parallel"
        },
        "torchtitan/distributed/context_parallel/api.py": {"apply_cp_to_forward": "attention_modules cp_mesh"},
        "torchtitan/config/configurable.py": {"Configurable.Config._owner": "_owner: ClassVar[type | None] = None"},
    },
}
# What is replaced or relied on as a whole: the first digits of the SHA-256 of its source.
BODIES: Table = {
    "megatron_rope": {
        f"{_EMBEDDINGS}/rope_utils.py": {
            "_apply_rotary_pos_emb_bshd": by_release({(0, 16): "0ef4824d5242", (0, 19): "7bd1c84e0953"})
        }
    },
    "megatron_activation_offloading": {
        f"{_CORE}/pipeline_parallel/fine_grained_activation_offload.py": {
            "PipelineOffloadManager.disable_offload": "b6a886403181",
            "PipelineOffloadManager.enable_offload": "f98384450110",
            "PipelineOffloadManager.pop_forward_chunk": "ab1561e21cfc",
        },
        f"{_CORE}/models/gpt/gpt_model.py": {
            "GPTModel.preprocess_for_fine_grained_offloading": by_release(
                {(0, 16): "ac73224597dc", (0, 18): "8d9fac598ce0", (0, 19): "e471d75caf14"}
            )
        },
    },
    "megatron_offloaded_optimizer": {
        f"{_CORE}/optimizer/cpu_offloading/hybrid_optimizer.py": {
            "HybridDeviceOptimizer._sync_sub_optimizers_state_to_hdo": "d86294975438",
            "HybridDeviceOptimizer.dummy_step": "2dd2ff333c3c",
        }
    },
    "torch_data_workers": {
        "torch/utils/data/dataloader.py": {"_MultiProcessingDataLoaderIter.__del__": "d2dca4e3c727"}
    },
    "torch_checkpoint_metadata": {
        "torch/distributed/checkpoint/filesystem.py": {"FileSystemReader.read_metadata": "e7da7abb9870"}
    },
    "cpu_host": {
        f"{_CORE}/tensor_parallel/random.py": {
            "_get_cuda_rng_state": "0c2b8f05b864",
            "_set_cuda_rng_state": "dea947ca0b7d",
        },
        f"{_CORE}/transformer/moe/moe_utils.py": {"maybe_move_tensor_to_cpu": "47a1092f05ba"},
    },
    "megatron_checkpoint_writer": {
        _WRITER: (
            {"_get_write_results_queue": "c86164c5bcab"}
            if CORE == (0, 16)
            else {"get_write_results_queue": "5528981e75e7"}
        ),
        f"{_DIST_CHECKPOINTING}/strategies/common.py": {
            SAVE_COMMON: by_release({(0, 16): "15b3cb005bff", (0, 17): "f7f9fa1d0c12", (0, 19): "d59462e91184"})
        },
        f"{_DIST_CHECKPOINTING}/core.py": {
            "save_config": by_release({(0, 16): "e8f89a7c8d83", (0, 19): "4561d81eed4d"})
        },
    },
    "megatron_data_parallel": {
        _BUFFERS: {
            "_ParamAndGradBucketGroup.check_grads": "65dd15ee6682",
            "_ParamAndGradBucketGroup.start_grad_sync": by_release(
                {
                    (0, 16): "66adbe07814a",
                    (0, 17): "87877d401684",
                    (0, 18): "74e0b56fc986",
                    (0, 19): "eabd0cc28135",
                }
            ),
        },
    },
    "megatron_experts": {
        f"{_CORE}/transformer/moe/moe_utils.py": {"RouterGatingLinearFunction": "32a20173b5a1"},
        f"{_CORE}/transformer/moe/router.py": {
            "TopKRouter.attach_and_log_load_balancing_loss": by_release(
                {
                    (0, 16): "73129ad920be",
                    (0, 17): "4bc5bb7f8aa2",
                    (0, 18): "00546644321f",
                    (0, 19): "c0318a46ca69",
                }
            )
        },
    },
    "megatron_lm": {
        f"{_CORE}/models/backends.py": {"LocalSpecProvider.core_attention": "5da9ce725a3c"},
        f"{_CORE}/extensions/transformer_engine_spec_provider.py": {"TESpecProvider.core_attention": "87fc5dc2cb17"},
        f"{_CORE}/utils.py": {
            "get_batch_on_this_cp_rank": by_release(
                {(0, 16): "b48cfcef6f1c", (0, 18): "a39ec3fc58b2", (0, 19): "0ad1630a22d0"}
            ),
            **PACKED_BATCHES,
        },
        f"{_EMBEDDINGS}/rope_utils.py": {"get_pos_emb_on_this_cp_rank": "51fa1b3c95a6"},
    },
    "transformers": {
        "transformers/modeling_utils.py": {"PreTrainedModel.set_attn_implementation": "202f4f1b3cef"},
        _MASKS: {
            "or_masks": "74a1287e427a",
            "and_masks": "cc8ea5001eae",
            "remap_positions_for_packed_sequence": "41e483041f52",
            "packed_sequence_mask_function": "78c2ac920fe0",
            **PACKED_MASKS,
        },
    },
    "accelerate": {
        "accelerate/accelerator.py": {
            "Accelerator._prepare_cp": "cd11307ce0cc",
            "Accelerator.maybe_context_parallel": "185068be5cae",
        },
        "accelerate/big_modeling.py": {"_attach_context_parallel_hooks": "f464bc2f4746"},
    },
    "diffusers": {
        _DISPATCH: {
            "_AttentionBackendRegistry": "49fa2362237c",
            "dispatch_attention_fn": "7869a6182cf5",
        },
    },
    "torchtitan": {
        "torchtitan/distributed/activation_checkpoint.py": {"SelectiveAC.get_save_ops": "4a70041b4bc8"},
        "torchtitan/distributed/context_parallel/api.py": {"prepare_context_parallel_input": "fe83b96e7b26"},
    },
}


@cache
def tree_of(file: str) -> tuple[str, ast.Module]:
    """The source of a file of a library, and its tree. Skips the test where the library is not installed."""
    library, _, rest = file.partition("/")
    try:
        metadata.version("megatron-core" if library == "megatron" else library)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    spec = importlib.util.find_spec(library)
    assert spec
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]  # megatron/ has two
    paths = [folder / rest for folder in folders if (folder / rest).is_file()]
    assert paths, f"{file}: not there"
    source = paths[0].read_text()
    return source, ast.parse(source)


def found(place: str) -> tuple[str, ast.AST]:
    """The source of a file, and the node in it that defines a name.

    Args:
        place: as "file.py:Class.method", or "file.py:function.local".
    """
    file, _, names = place.partition(":")
    source, node = tree_of(file)
    for name in names.split("."):
        # The outermost, since ast.walk goes level by level.
        definition = next((inner for inner in ast.walk(node) if name in _defines(inner)), None)
        assert definition, f"{place}: no {name}"
        node = definition
    return source, node


def _defines(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [ast.unparse(target).removeprefix("self.") for target in targets]
        case ast.AnnAssign(target=target):
            return [ast.unparse(target).removeprefix("self.")]
        case ast.ImportFrom(names=names):
            return [alias.asname or alias.name for alias in names]
    return []


def shape_of(place: str) -> str:
    match found(place)[1]:
        case ast.FunctionDef(args=args):
            named = [x.arg for x in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            return " ".join([*named, *(f"*{x.arg}" for x in (args.vararg, args.kwarg) if x)])
        case ast.ClassDef():
            return "class"
        case ast.ImportFrom(module=module, level=level):
            return f"from {'.' * level}{module}"
        case node:
            return ast.unparse(node)


def body_of(place: str) -> str:
    source, node = found(place)
    return hashlib.sha256((ast.get_source_segment(source, node) or "").encode()).hexdigest()[:12]


def cases(table: Table) -> list:
    found = []
    for ours, files in table.items():
        for file, names in files.items():
            found += [pytest.param(f"{file}:{name}", known, id=f"{ours}-{name}") for name, known in names.items()]
    return found


@pytest.mark.parametrize("place,known", cases(SHAPES))
def test_what_is_called_has_its_shape(place, known):
    assert shape_of(place) == known


@pytest.mark.parametrize("place,known", cases(BODIES))
def test_what_is_replaced_or_relied_on_is_what_was_read(place, known):
    assert body_of(place) == known


@pytest.mark.parametrize("file", FILES)
def test_a_file_was_checked_with_the_installed_releases(file):
    tree = ast.parse((FOLDER / f"{file}.py").read_text())
    checked = ast.literal_eval(next(node.value for node in tree.body if _defines(node) == ["CHECKED"]))
    assert checked and len(ast.get_docstring(tree) or "") > 80
    for library, release in checked.items():
        try:
            found = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
        first, last = release_of(release.partition(" to ")[0]), release_of(release.rpartition(" to ")[2])
        assert first <= release_of(found) <= last, f"{library} {found}: look at patches/{file}.py"


def test_each_file_is_compared_with_its_library():
    in_tests = {file for file in FILES if f"test_{file}" in globals()}
    assert {*SHAPES, *BODIES} | in_tests == {*FILES}


# --------------------------------------------------------------------------------- behaviour that is relied on


def test_torch_dispatcher():
    x = torch.ones(2, requires_grad=True)
    with torch_dispatcher.below_autograd():
        assert torch.is_grad_enabled() and not (x * 2).requires_grad
    assert (x * 2).requires_grad
    assert not torch_dispatcher.in_transform()
    inside = []
    torch.func.grad(lambda y: inside.append(torch_dispatcher.in_transform()) or y.sum())(torch.ones(2))
    assert inside == [True]


def test_torch_foreach():
    into = [torch.zeros(2, 3).t(), torch.zeros(2, dtype=torch.bfloat16)]
    torch_foreach.copy_each(into, [torch.arange(6.0).view(3, 2), torch.tensor([1.0, 2.0])])
    assert into[0].tolist() == [[0, 1], [2, 3], [4, 5]] and into[1].tolist() == [1, 2]
    norms = torch_foreach.norm_of_each([torch.tensor([3.0, 4.0]), torch.tensor([[2.0]])])
    assert [(x.tolist(), x.shape) for x in norms] == [(5.0, ()), (2.0, ())]


def test_torch_write_counter():
    x = torch.zeros(4)
    before = torch_write_counter.writes_to(x)
    x[:2].add_(1)
    assert torch_write_counter.writes_to(x) == before + 1
    with torch.inference_mode():
        assert torch_write_counter.writes_to(torch.zeros(2)) == 0


def test_torch_cpu_attention():
    assert str(torch_cpu_attention.cpu_attention.default._schema) == (
        "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float "
        "dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output,"
        " Tensor logsumexp)"
    )
    assert str(torch_cpu_attention.cpu_attention_backward.default._schema) == (
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor "
        "key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? "
        "attn_mask=None, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    )
    q, k, v = torch.randn(3, 1, 1, 5, 8, dtype=torch.float64)
    out, lse = torch_cpu_attention.cpu_attention(q, k, v, 0.0, False, scale=0.3)
    scores = q @ k.mT * 0.3
    assert torch.allclose(lse, scores.logsumexp(-1)) and torch.allclose(out, scores.softmax(-1) @ v)


def test_torch_packed_linear():
    x, weight, bias = torch.randn(5, 12), torch.randn(7, 12), torch.randn(7)
    assert torch_packed_linear.can_pack(weight) and not torch_packed_linear.can_pack(weight.double())
    packed = torch_packed_linear.pack(weight)
    for given in (None, bias):
        found = torch_packed_linear.packed_linear(x, packed, given)
        assert torch.allclose(found, torch.nn.functional.linear(x, weight, given), rtol=1e-4, atol=1e-5)


def test_torch_fake_tensors():
    with torch_fake_tensors.FakeTensorMode():
        assert torch.empty(1 << 40, 1 << 10).nbytes == 1 << 52


@pytest.fixture
def world():
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_torch_process_groups(world):
    torch_process_groups.default_store().set("key", "value")
    made = torch_process_groups.new_process_group(world, [0], "a name", "what for")
    assert dist.get_process_group_ranks(made) == [0] and made.group_desc == "what for"
    assert torch_process_groups.timeout_of(made) == torch_process_groups.timeout_of(world)
    assert torch_process_groups.options_of(world) is None  # not of NCCL
    assert world.bound_device_id is None  # a property, which is set meanwhile


def test_torch_all_gather(world):
    everyone = torch.zeros(2, 3)
    torch_all_gather.all_gather(world, everyone, torch.arange(6.0).view(2, 3)).wait()
    assert everyone.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_torch_coalescing(world):
    assert not torch_coalescing.can_coalesce(world, torch.device("cpu"))
    everyone = torch.zeros(2)
    with torch_coalescing.as_one(world, async_ops=True) as together:
        dist.all_gather_into_tensor(everyone, torch.ones(2))
    together.wait()
    assert everyone.tolist() == [1, 1]


def test_torch_data_workers(monkeypatch):
    assert [*inspect.signature(Queue._on_queue_feeder_error).parameters] == ["e", "obj"]
    kind = dataloader._MultiProcessingDataLoaderIter
    not_started = object.__new__(kind)
    with pytest.raises(AttributeError, match="_shutdown"):
        not_started.__del__()
    monkeypatch.setattr(kind, "_shutdown", None, raising=False)
    torch_data_workers.forget_workers()
    not_started.__del__()
    not_started._shutdown = True  # the mark of the class is taken back


def test_waiting_frames(world, monkeypatch):
    seen = []
    look = lambda *_: seen.append(waiting_frames.awaited_by(sys._getframe()))  # noqa: E731
    monkeypatch.setattr(distributed_c10d, "_check_single_tensor", look)
    dist.all_reduce(torch.ones(1))
    assert seen == [("all_reduce", "", ())]


def test_megatron_lm():
    ours = {"core_attention": 1, "batch": 2, "packed_batch": 3, "hybrid_batch": 3, "embedding": 4}
    places = [*megatron_lm.replaced_by(**ours, call=lambda forward: forward.__name__)]
    assert all(callable(getattr(owner, name)) for owner, name, _ in places)
    packed = {(0, 16): [3, 3], (0, 17): [3, 3], (0, 18): [2]}.get(CORE, [])
    assert [value for *_, value in places] == [1, 1, 2, *packed, 4, 4, 4, "forward"]
