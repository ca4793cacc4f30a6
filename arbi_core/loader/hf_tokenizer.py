"""Reads the tokenizer files of a Hugging Face directory. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arbi_core.builtin.safetensors_format import read_json
from arbi_core.errors import CheckpointError
from arbi_core.loader.base import TokenizerParts

__all__ = ["read_tokenizer"]

SPECIAL = ("unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_tokenizer(path: Path) -> TokenizerParts | None:
    """Build the parts from ``tokenizer.json``, ``tokenizer_config.json``, ``special_tokens_map.json`` and templates.

    Returns None where there is no ``tokenizer.json``. Raises `CheckpointError` for a file that cannot be read.
    """
    import tokenizers

    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as exc:  # the Rust side raises bare Exception
        raise CheckpointError(f"{file} cannot be read: {exc}") from exc
    config = read_json(path / "tokenizer_config.json")
    special_map = read_json(path / "special_tokens_map.json")

    def token(key: str) -> str | None:
        return _text(config.get(key)) or _text(special_map.get(key))

    return TokenizerParts(
        backend=backend,
        bos_token=token("bos_token"),
        eos_token=token("eos_token"),
        chat_templates=_templates(path, config),
        special={k: t for k in SPECIAL if (t := token(k)) is not None},
    )


def _text(value: Any) -> str | None:
    """A token is written as a string or as an ``AddedToken`` object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; the file ``chat_template.jinja`` wins over ``tokenizer_config.json``."""
    templates: dict[str, str] = {}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        templates["default"] = declared
    elif isinstance(declared, list):
        templates.update({t["name"]: t["template"] for t in declared})
    legacy = read_json(path / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        templates["default"] = legacy
    if (path / "chat_template.jinja").is_file():
        templates["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    return templates
