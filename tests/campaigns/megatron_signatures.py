"""Checks that a megatron-core, which need not run here, has the functions that this project replaces and calls.

    python -m tests.campaigns.megatron_signatures FOLDER

FOLDER is an unpacked wheel: megatron/core is in it. Names and signatures are compared, nothing is imported.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron.context_parallel.integration.rope import LayoutRotaryEmbedding
from megatron.context_parallel.integration.spec import ContextParallelAttention

_EMBEDDINGS = "models/common/embeddings"
# Functions by file, with arguments that they must have.
NEEDED = {
    "utils.py": {"get_batch_on_this_cp_rank": {"batch", "cp_group"}},
    "parallel_state.py": {"get_context_parallel_group": set()},
    "models/backends.py": {"LocalSpecProvider.core_attention": {"self"}},
    "extensions/transformer_engine_spec_provider.py": {"TESpecProvider.core_attention": {"self"}},
    f"{_EMBEDDINGS}/rope_utils.py": {"get_pos_emb_on_this_cp_rank": {"pos_emb", "seq_dim", "cp_group"}},
    f"{_EMBEDDINGS}/rotary_pos_embedding.py": {
        "RotaryEmbedding.get_emb": {"max_seq_len"},
        "RotaryEmbedding.get_rotary_seq_len": {"packed_seq_params"},
        "RotaryEmbedding.forward": {"max_seq_len", "offset", "packed_seq", "cp_group"},
    },
    "transformer/spec_utils.py": {"build_module": {"spec_or_module"}},
}
IMPORTERS = [f"{_EMBEDDINGS}/{name}.py" for name in ("rotary_pos_embedding", "yarn_rotary_pos_embedding")]


def main(folder: Path) -> int:
    core = folder / "megatron" / "core"
    missing = [*_missing(core), *_calls(core)]
    print("\n".join(missing) or "all names and signatures are there")
    return int(bool(missing))


def _missing(core: Path) -> Iterator[str]:
    for file, functions in NEEDED.items():
        found = _functions(ast.parse((core / file).read_text())) if (core / file).exists() else {}
        for name, arguments in functions.items():
            if name not in found:
                yield f"{file}: no {name}"
            elif absent := arguments - found[name]:
                yield f"{file}: {name} has no {', '.join(sorted(absent))}"
    for file in IMPORTERS:
        names = {x.name for x in ast.walk(ast.parse((core / file).read_text())) if isinstance(x, ast.alias)}
        if "get_pos_emb_on_this_cp_rank" not in names:
            yield f"{file}: does not import get_pos_emb_on_this_cp_rank"


def _functions(tree: ast.Module) -> dict[str, set[str]]:
    """The arguments of each function and method of a module."""
    found = {}
    for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
        for node in owner.body:
            if isinstance(node, ast.FunctionDef):
                found[prefix + node.name] = {x.arg for x in (*node.args.args, *node.args.kwonlyargs)}
    return found


def _calls(core: Path) -> Iterator[str]:
    """Arguments that megatron-core gives to a core attention or a rotary embedding, and ours do not take."""
    attention = ast.parse((core / "transformer" / "attention.py").read_text())
    model = ast.parse((core / "models" / "gpt" / "gpt_model.py").read_text())
    built = [
        node.value
        for node in ast.walk(attention)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.core_attention"
    ]
    for calls, ours, what in (
        (built, ContextParallelAttention.__init__, "builds a core attention"),
        (_calls_of(attention, "self.core_attention"), ContextParallelAttention.forward, "calls a core attention"),
        (_calls_of(model, "self.rotary_pos_emb"), LayoutRotaryEmbedding.forward, "calls a rotary embedding"),
    ):
        if not calls:
            yield f"no line {what}"
        given = {keyword.arg for call in calls for keyword in call.keywords} - {None}
        if unknown := given - inspect.signature(ours).parameters.keys():
            yield f"{what} with {', '.join(sorted(unknown))}"


def _calls_of(tree: ast.Module, function: str) -> list[ast.Call]:
    forms = function, f"apply_module({function})"
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in forms]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
