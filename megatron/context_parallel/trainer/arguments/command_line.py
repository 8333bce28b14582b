"""From the command line and files of flags to `Flags`. Unknown flags and invalid values are rejected here."""

from pathlib import Path
from typing import Any

import yaml

from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.errors import UsageError, raise_all
from megatron.context_parallel.progress import is_first_rank
from megatron.context_parallel.trainer.checkpoint.saved_flags import saved_flags
from megatron.context_parallel.trainer.config.flags import PRESETS, Flags
from megatron.context_parallel.trainer.config.upstream_flags import UPSTREAM, refused, without_effect

_MOST_USED = (
    "preset",
    "config",
    "dry_run",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "lr",
    "save",
    "load",
    "save_interval",
    "bf16",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "use_distributed_optimizer",
    "context_parallel_size",
    "cp_strategy",
    "cp_layout",
    "data_path",
    "seq_length",
    "tokenizer_type",
    "log_interval",
)
PARSER = FlagParser(
    Flags,
    "Pretrain a GPT or Llama with tensor, pipeline, data and context parallelism.\n"
    "Flags have Megatron's names and meanings.",
    "[--preset NAME] [flags]",
    [
        "--preset tiny-llama --mock-data --context-parallel-size 2 --micro-batch-size 1 --train-iters 20 --lr 1e-3",
        "--preset llama3-8b --seq-length 131072 --context-parallel-size 2 --micro-batch-size 1 --bf16 --dry-run",
    ],
    foreign=UPSTREAM,
    torchrun=True,
    most_used=_MOST_USED,
)


def read_flags(argv: list[str] | None = None, unknown: list[UsageError] | None = None) -> Flags:
    """The flags of `argv` (None: of the program). They override `--config`, which overrides `--preset`.

    The first rank prints which flags of Megatron-LM have no effect. `unknown` receives the errors about unsupported
    flags. Without it they are raised.

    Raises:
        UsageError: a line for each flag with an invalid value, with a value that works, and for each unknown flag.
    """
    errors = list[UsageError]() if unknown is None else unknown
    given = PARSER.read(argv, errors)
    config = _of_file(Path(given["config"]), f"--config {given['config']}") if "config" in given else {}
    preset = (config | given).get("preset")
    values = _of_file(PRESETS[preset], f"--preset {preset}") if preset else {}
    found = values | config | given
    foreign = {option: found.pop(option) for option in [*found] if option in UPSTREAM}
    errors += refused(foreign)
    if unknown is None:
        raise_all(errors)
    if (lines := without_effect(foreign)) and is_first_rank():
        print("\n".join(lines), flush=True)
    if found.get("use_checkpoint_args") and found.get("load"):
        found = saved_flags(Flags(**found)) | found
    return Flags(**found)


def _of_file(path: Path, source: str) -> dict[str, Any]:
    """The values in a YAML file, by field; null counts as absent. Flags of Megatron-LM are by option."""
    try:
        values = yaml.safe_load(path.read_text())
        if not isinstance(values, dict) or "config" in values:
            raise ValueError("it must map flags to values, without config")
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UsageError(f"{source}: cannot be read ({why}); write lines such as num-layers: 24") from None
    options = {"--" + str(name).replace("_", "-"): value for name, value in values.items()}
    try:
        if unknown := [option for option in options if option not in PARSER.by_option | UPSTREAM]:
            raise UsageError(PARSER.explain_unknown(unknown, unknown)[0])
        ours = [(PARSER.by_option[name], value) for name, value in options.items() if name not in UPSTREAM]
        found = {flag.name: flag.parse(_as_text(value)) for flag, value in ours if value is not None}
        return found | {name: _words(value) for name, value in options.items() if name in UPSTREAM and value}
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _words(value: object) -> list[str]:
    """A YAML value as the words that would follow its flag."""
    return [] if value is True else [str(item) for item in (value if isinstance(value, list) else [value])]


def _as_text(value: object) -> object:
    """A YAML value as on a command line. true and false stay as they are."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return value if isinstance(value, bool) else str(value)
