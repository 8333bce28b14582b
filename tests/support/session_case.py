"""A tiny GPTModel over a shared cache, and the same model that computes each token from the start on one rank."""

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron.context_parallel import ContextParallel
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.integration.gemma import scale_embeddings
from megatron.context_parallel.integration.model_config import ModelConfig
from megatron.context_parallel.integration.rope import use_layout
from megatron.context_parallel.integration.spec import block_spec
from megatron.context_parallel.integration.vocabulary import leave_out_padding
from megatron.context_parallel.integration.yarn import use_yarn
from megatron.context_parallel.patches.cpu_host import support_cpu_host
from tests.support.device import HEAD_DIM, on_device

support_cpu_host()
VOCABULARY, PADDED, LENGTH = 29, 32, 256
Tokens = dict[int, list[int]]


def config(**changes) -> ModelConfig:
    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": HEAD_DIM,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "transformer_impl": "local",
        "init_method_std": 0.3,
        "bias_dropout_fusion": False,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
    }
    return ModelConfig(**values | changes)


def model(
    ours: bool, positions: str = "rope", model_args: dict | None = None, uneven: bool = False, **changes
) -> GPTModel:
    """With our attention, or with megatron-core's; the weights are the same.

    Args:
        positions: "rope", "yarn" or "learned_absolute".
        model_args: more arguments of `GPTModel`; changes: of the configuration.
        uneven: norms and biases have any weights, not only 1 and 0.
    """
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    settings = config(**changes)
    yarn, more = positions == "yarn", {**(model_args or {})}
    positions = "rope" if yarn else positions
    if not ours:
        settings.context_parallel_size = 1
    cp = ContextParallel("ring", group=parallel_state.get_context_parallel_group()) if ours else None
    spec = block_spec(settings, cp, settings.num_layers) if cp else get_gpt_layer_local_spec(normalization="RMSNorm")
    more["position_embedding_type"] = positions
    built = on_device(GPTModel(settings, spec, PADDED, LENGTH, parallel_output=ours, **more))
    leave_out_padding(built, VOCABULARY)
    if yarn:
        use_yarn(built, 10000, settings.yarn_rotary_scaling_factor, 32, 32.0, 1.0, True)
    if settings.scale_embeddings:
        scale_embeddings(built)
    if uneven:
        _make_uneven(built)
    if settings.params_dtype is torch.bfloat16:
        built.bfloat16()  # as megatron-core's Float16Module
    if cp:
        use_layout(built, cp)
    elif positions == "rope":
        built.rotary_pos_emb.cp_group = None  # it would take the zigzag part of a rank
    return built


@torch.no_grad()
def _make_uneven(model: GPTModel) -> None:
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weight += torch.empty(weight.shape).uniform_(-0.4, 0.4, generator=generator).to(weight)


def start(tensor: int = 1) -> None:
    """Model-parallel groups of this world: all ranks that tensor parallelism leaves share sequences."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, context_parallel_size=dist.get_world_size() // tensor
    )


def session(positions: str = "rope", *, changes: dict | None = None, **options) -> Session:
    """With a cache that is full of NaN."""
    built = model(True, positions, **(changes or {}))
    of = Session(built, built.context_parallel, **{"cache_tokens": 512, "page": 4, **options})
    poison(of)
    return of


def poison(of: Session) -> None:
    """Fills the free pages of this rank with NaN."""
    for pages in (x for layer in of.cache.layers for x in layer):
        # 255 in each byte of a float32 scale is a NaN too.
        pages[of.tables._pools[of.cp.rank].free] = 255 if pages.dtype is torch.uint8 else float("nan")


def prompts(turn: int, lengths: list[int]) -> list[list[int]]:
    """The user's text of a turn, one for each sequence."""
    generator = torch.Generator().manual_seed(turn)
    return [torch.randint(VOCABULARY, (count,), generator=generator).tolist() for count in lengths]


@torch.no_grad()
def next_token(whole: GPTModel, tokens: list[int], window: int = -1) -> tuple[int, torch.Tensor]:
    """The token after `tokens` by megatron-core's own attention, and its logits."""
    device = next(whole.parameters()).device
    at = torch.arange(len(tokens), device=device)
    hide = at[None, :] > at[:, None]
    if window >= 0:
        hide |= at[None, :] < at[:, None] - window
    vocabulary = getattr(whole, "vocabulary", whole.vocab_size)
    logits = whole(torch.tensor([tokens], device=device), at.unsqueeze(0), hide[None, None])[0, -1, :vocabulary]
    return int(logits.argmax()), logits


def greedy_from_the_start(turns: list[list[int]], steps: int, positions: str = "rope", **changes) -> list[list[int]]:
    """The whole conversations, each token computed from the start on this rank alone."""
    window = changes.pop("window_size", (-1, 0))[0]
    return answer_from_the_start(model(False, positions, **changes).eval(), prompts, turns, steps, window)


def answer_from_the_start(
    whole: GPTModel, say: Callable, turns: list[list[int]], steps: int, window: int = -1
) -> list[list[int]]:
    """The same with a given model; `say(turn, lengths)` is what a user says."""
    texts: list[list[int]] = [[] for _ in turns[0]]
    for turn, lengths in enumerate(turns):
        for text, prompt in zip(texts, say(turn, lengths), strict=True):
            text += prompt
            for _ in range(steps if prompt else 0):
                text.append(next_token(whole, text, window)[0])
    return texts


def step(of: Session, new: Tokens, prefill: str | None = None) -> Tokens:
    """A pass, and the most likely next token of each of its sequences on all ranks."""
    chosen = {sequence: [int(logits.argmax())] for sequence, logits in of.forward(new, prefill).items()}
    return {sequence: [int(token)] for sequence, (token,) in of.share(chosen).items()}


def greedy(
    of: Session,
    turns: list[list[int]],
    steps: int,
    chunk: int = 1000,
    variants: tuple = (None,),
    say: Callable = prompts,
) -> list[list[int]]:
    """The whole conversations over the cache. Prompts come in chunks, and variants take turns."""
    sequences = [of.open() for _ in turns[0]]
    texts: list[list[int]] = [[] for _ in sequences]
    done = [0] * len(sequences)  # tokens in the cache
    passes = 0
    for turn, lengths in enumerate(turns):
        talking = [i for i, count in enumerate(lengths) if count]
        for i in talking:
            texts[i] += say(turn, lengths)[i]
        left = {i: steps for i in talking}
        while left:
            new = {sequences[i]: texts[i][done[i] : done[i] + chunk] for i in left}
            found = step(of, new, variants[passes % len(variants)])
            passes += 1
            for i in list(left):
                done[i] += len(new[sequences[i]])
                if done[i] == len(texts[i]):
                    texts[i] += found[sequences[i]]
                    left[i] -= 1
                    if not left[i]:
                        del left[i]
    assert [of.length(s) for s in sequences] == done
    return texts
