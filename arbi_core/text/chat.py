"""Chat templates: messages to the text that the model was trained on. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from arbi_core.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    import jinja2

    from arbi_core.text.tokenizer import Tokenizer

__all__ = ["encode_chat", "normalize_messages", "render_chat"]

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_RENDERED = 16 << 20
"""Longest rendered prompt in characters; a template that makes more than this has gone wild."""


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Render and encode. The template writes the begin token itself, so none is added."""
    text = render_chat(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        template=template,
        variables=variables,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render messages with the checkpoint's chat template.

    Args:
        tokenizer: brings the templates and the named tokens.
        messages: OpenAI-style messages.
        add_generation_prompt: end with the header of the assistant's turn.
        tools: tool descriptions for templates that take them.
        template: Jinja source to use instead of the checkpoint's.
        variables: further template variables (``enable_thinking``, ...).

    Raises:
        RequestError: no template, bad messages, or the template itself refuses them.
        CheckpointError: the template is not valid Jinja.
    """
    source = template or _choose(tokenizer, with_tools=bool(tools))
    reserved = {"messages", "tools", "add_generation_prompt"} & set(variables or {})
    if reserved:
        raise RequestError(
            f"{', '.join(sorted(reserved))} cannot be set as template variables", param="chat_template_kwargs"
        )
    compiled = _compile(source)
    pieces: list[str] = []
    size = 0
    try:
        for piece in compiled.generate(
            **tokenizer.named_tokens,
            **(variables or {}),
            messages=normalize_messages(messages),
            tools=tools or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        ):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_RENDERED:
                raise RequestError(f"the chat template makes a prompt of more than {MAX_RENDERED} characters")
    except RequestError:
        raise
    except Exception as exc:  # a template can raise anything; all of it concerns this request alone
        raise RequestError(f"the chat template refuses these messages: {exc}", param="messages") from exc
    return "".join(pieces)


def normalize_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check roles and contents; text parts of a message become one text.

    Raises:
        RequestError: no messages, an unknown role, a missing content or a part that is not text.
    """
    result = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object with role and content", param="messages")
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}", param="messages")
        plain = dict(message)
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            plain["content"] = "".join(_part(p, f"{where}.content[{j}]") for j, p in enumerate(content))
        elif content is None and (role == "assistant" and message.get("tool_calls")):
            plain["content"] = ""
        elif not isinstance(content, str):
            raise RequestError(f"{where}.content must be text, not {content!r}", param="messages")
        result.append(plain)
    if not result:
        raise RequestError("messages is empty; it needs at least one message", param="messages")
    return result


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise RequestError(f"{where} has type {kind!r}; this model takes text parts only", param="messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be text, not {text!r}", param="messages")
    return text


def _choose(tokenizer: Tokenizer, *, with_tools: bool) -> str:
    templates = tokenizer.chat_templates
    if with_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" not in templates:
        raise RequestError(
            "this model has no chat template, so it cannot take messages; use the completions endpoint with a prompt"
        )
    return templates["default"]


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from arbi_core.text.jinja_ext import GenerationTag

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # prompts are no HTML
        extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as exc:
        raise CheckpointError(f"the chat template is not valid Jinja: line {exc.lineno}: {exc.message}") from exc


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: FBT001
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise RequestError(f"the chat template refuses these messages: {message}", param="messages")


def _now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
