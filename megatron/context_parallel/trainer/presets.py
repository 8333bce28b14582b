"""Flags from YAML files: the presets that come with the package, and a user's own."""

import difflib
from pathlib import Path

import yaml

from ..errors import UsageError

_DIRECTORY = Path(__file__).parent / "presets"
PRESETS = tuple(sorted(path.stem for path in _DIRECTORY.glob("*.yaml")))


def read_preset(name: str) -> dict[str, object]:
    """The flags of a preset, by name without dashes in front.

    Raises:
        UsageError: there is no preset of that name.
    """
    if name not in PRESETS:
        closest = difflib.get_close_matches(str(name), PRESETS, 3, cutoff=0.0)
        raise UsageError(f"--preset {name}: unknown; choose {' or '.join(closest)} (--help lists all)")
    return _read(_DIRECTORY / f"{name}.yaml", f"--preset {name}")


def read_config(path: str) -> dict[str, object]:
    """The flags in the YAML file `path`, by name with dashes.

    Raises:
        UsageError: the file cannot be read, or is not a mapping of flags to values.
    """
    return _read(Path(path), f"--config {path}")


def _read(path: Path, source: str) -> dict[str, object]:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UsageError(
            f"{source}: cannot be read ({reason}); give a YAML file with lines such as num-layers: 24"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1} is" if mark else "it is"
        raise UsageError(f"{source}: {where} not YAML; write lines such as num-layers: 24") from None
    if not isinstance(values, dict):
        raise UsageError(f"{source}: holds no flags; write lines such as num-layers: 24")
    return {str(key).replace("_", "-"): value for key, value in values.items()}
