"""Reads the JSON and text files of a checkpoint with errors that name the file. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arbi_core.errors import CheckpointError

__all__ = ["read_json", "read_text"]


def read_text(path: Path) -> str:
    """Read a UTF-8 text file. Raises `CheckpointError` naming the file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except UnicodeDecodeError as exc:
        raise CheckpointError(f"{path} is not UTF-8 text: {exc}") from exc
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}") from exc


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Read a JSON object; a missing optional file is empty.

    Raises:
        CheckpointError: a required file is missing, or the file is no JSON object; the message names it.
    """
    if not required and not path.exists():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
