"""Errors that end one request: the message for the client, and the line in the log."""

import json
import logging
import traceback
from pathlib import Path

log = logging.getLogger(__name__)
NAN = "the model computed a logit that is NaN, so the text ends"
MISTAKE = "internal error of the server with this text"
GRAMMAR = "the grammar allows no token, or is too complex, so the text ends; simplify it"


class GrammarFault(Exception):
    """No token may come next."""


def log_fault(name: str, error: Exception) -> None:
    """Log an error that ends the request `name`: its type and where it was raised, in one line.

    Its message is omitted, because it may contain texts, which are never logged.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    log.error(json.dumps({"id": name, "error": type(error).__name__, "at": where}))
