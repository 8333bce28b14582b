"""From the command line and files of flags to `Flags`; what is no flag, or no value of it, is refused here."""

from pathlib import Path
from typing import Any

import yaml

from ..errors import UsageError
from .flag_parser import FlagParser
from .flags import PRESETS, SECTIONS, Flags

PARSER = FlagParser(
    SECTIONS,
    "Pretrain a GPT or Llama with tensor, pipeline, data and context parallelism. "
    "Flags have Megatron's names and meanings.",
    "[--preset NAME] [flags]",
)


def read_flags(argv: list[str] | None = None) -> Flags:
    """The flags of `argv` (default: the program's), which win over those in `--config`, and these over `--preset`.

    Raises:
        UsageError: one line that names every unknown flag, or the flag whose value is none, and a value that works.
    """
    given = PARSER.read(argv)
    config = _of_file(Path(given["config"]), f"--config {given['config']}") if "config" in given else {}
    preset = (config | given).get("preset")
    values = _of_file(PRESETS[preset], f"--preset {preset}") if preset else {}
    return Flags(**(values | config | given))


def _of_file(path: Path, source: str) -> dict[str, Any]:
    """The values that a YAML file gives, by field; null is as good as nothing."""
    try:
        values = yaml.safe_load(path.read_text())
        if not isinstance(values, dict) or "config" in values:
            raise ValueError("it must have flags, and not --config")
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UsageError(f"{source}: cannot be read ({why}); write lines such as num-layers: 24") from None
    options = {"--" + str(name).replace("_", "-"): value for name, value in values.items()}
    try:
        if unknown := [option for option in options if option not in PARSER.by_option]:
            raise UsageError(PARSER.explain_unknown(unknown))
        given = [(PARSER.by_option[option], value) for option, value in options.items() if value is not None]
        return {flag.name: flag.value(_as_text(value)) for flag, value in given}
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _as_text(value: object) -> object:
    """A value of YAML as a command line gives it, but for true and false, which are no texts."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return value if isinstance(value, bool) else str(value)
