"""Reads the tokenizer files of a Hugging Face directory. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbi_core.errors import CheckpointError
from arbi_core.loader.base import TokenizerParts
from arbi_core.loader.json_file import read_json, read_text

if TYPE_CHECKING:
    import tokenizers

__all__ = ["read_tokenizer"]

SPECIAL = ("unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
EXTRA = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_tokenizer(path: Path) -> TokenizerParts | None:
    """Build the parts from ``tokenizer.json``, ``tokenizer_config.json``, ``special_tokens_map.json`` and templates.

    As in transformers, tokens that ``added_tokens_decoder`` declares are added where ``tokenizer.json`` lacks them, and
    special tokens that are named become special where they are ordinary words of the vocabulary. A name in
    ``tokenizer_config.json`` beats the same name in ``special_tokens_map.json``.

    Returns:
        The parts, or None where there is no ``tokenizer.json``.

    Raises:
        CheckpointError: a file cannot be read, or two files disagree on the id of a token.
    """
    import tokenizers

    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as exc:  # the Rust side raises bare Exception
        raise CheckpointError(f"{file} cannot be read: {exc}") from exc
    config_file = path / "tokenizer_config.json"
    config = read_json(config_file)
    named = {**read_json(path / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
    _add_declared(backend, config.get("added_tokens_decoder") or {}, config_file)
    _mark_special(backend, named)
    return TokenizerParts(
        backend=backend,
        bos_token=_text(named.get("bos_token")),
        eos_token=_text(named.get("eos_token")),
        chat_templates=_templates(path, config),
        special={k: t for k in SPECIAL if (t := _text(named.get(k))) is not None},
    )


def _text(value: Any) -> str | None:
    """A token is written as a string or as an ``AddedToken`` object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _add_declared(backend: tokenizers.Tokenizer, declared: Any, file: Path) -> None:
    """Add the tokens of ``added_tokens_decoder`` (id -> AddedToken) that the tokenizer lacks or holds otherwise."""
    try:
        tokens = {int(key): _token(value["content"], value) for key, value in declared.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise CheckpointError(f"{file}: added_tokens_decoder is malformed: {exc!r}") from exc
    present = {token_id: _state(token) for token_id, token in backend.get_added_tokens_decoder().items()}
    backend.add_tokens([token for i, token in sorted(tokens.items()) if _state(token) != present.get(i)])
    for token_id, token in tokens.items():
        actual = backend.token_to_id(token.content)
        if actual != token_id:
            raise CheckpointError(
                f"{file} declares token {token.content!r} with id {token_id}, and tokenizer.json gives it id {actual}; "
                "take both files from the same model"
            )


def _token(content: str, flags: Mapping[str, Any]) -> tokenizers.AddedToken:
    import tokenizers

    return tokenizers.AddedToken(content, **{k: flags[k] for k in FLAGS if k in flags})


def _state(token: Any) -> tuple[Any, ...]:
    return (token.content, *(getattr(token, flag) for flag in FLAGS))


def _mark_special(backend: tokenizers.Tokenizer, named: Mapping[str, Any]) -> None:
    """Make every named token that the vocabulary holds a special one; a token without an id stays a name."""
    values = [named.get(key) for key in ("bos_token", "eos_token", *SPECIAL)]
    for key in EXTRA:
        extra = named.get(key)
        values += extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    words = {name: value for value in values if (name := _text(value)) is not None and name not in added}
    backend.add_tokens(
        [
            _token(name, {**(value if isinstance(value, dict) else {}), "special": True})
            for name, value in words.items()
            if backend.token_to_id(name) is not None
        ]
    )


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name.

    The default one comes from ``chat_template.jinja``, else ``chat_template.json``, else ``tokenizer_config.json``.
    """
    templates: dict[str, str] = {}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        templates["default"] = declared
    elif declared is not None:
        try:
            templates.update({str(t["name"]): str(t["template"]) for t in declared})
        except (KeyError, TypeError) as exc:
            raise CheckpointError(
                f"{path / 'tokenizer_config.json'}: chat_template must be a string or a list of objects with name and "
                f"template, not {declared!r:.80}"
            ) from exc
    legacy = read_json(path / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        templates["default"] = legacy
    if (path / "chat_template.jinja").is_file():
        templates["default"] = read_text(path / "chat_template.jinja")
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = read_text(extra)
    return templates
