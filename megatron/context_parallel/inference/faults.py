"""Errors that end one request: what its client is told, and what the log says."""

import json
import logging
import traceback
from pathlib import Path

log = logging.getLogger(__name__)
NAN = "a logit of the model is NaN, so the text ends"
MISTAKE = "the server made a mistake with this text"


def log_fault(name: str, error: Exception) -> None:
    """Log an error that ends the request `name`: its kind and where it was raised, in a line.

    Its message is left out: it may have texts, which are in no log.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    log.error(json.dumps({"id": name, "error": type(error).__name__, "at": where}))
