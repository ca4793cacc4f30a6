"""Chat messages in OpenAI's form: checked, and brought into the form that templates expect. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from arbi_core.errors import RequestError

__all__ = ["normalize_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send back what the model thought; templates read the first two."""


def normalize_messages(
    messages: Iterable[Mapping[str, Any]], *, keep_parts: bool = False, wrap_text: bool = False
) -> list[dict[str, Any]]:
    """Check roles, contents and tool calls, and return new messages for a template.

    Fields that are null are left out, arguments of tool calls become objects (OpenAI sends them as JSON text, templates
    write them as JSON), and a message's reasoning is found under every name that templates use.

    Args:
        messages: OpenAI-style messages.
        keep_parts: leave content that is a list of parts as it is; otherwise its texts are joined.
        wrap_text: make content that is a text a list with one text part.

    Raises:
        RequestError: no messages, an unknown role, a missing content, a part that is not text, a malformed tool call.
    """
    result = [_message(m, f"messages[{i}]", keep_parts=keep_parts) for i, m in enumerate(messages)]
    if not result:
        raise RequestError("messages is empty; it needs at least one message", param="messages")
    if wrap_text:
        for message in result:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
    return result


def _message(message: Any, where: str, *, keep_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refusal(f"{where} must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise _refusal(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    plain = {key: value for key, value in message.items() if value is not None}
    calls = plain.get("tool_calls")
    if calls is not None:
        plain["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls", role)
    content = plain.get("content")
    if isinstance(content, (list, tuple)):
        texts = [_part(p, f"{where}.content[{j}]") for j, p in enumerate(content)]
        plain["content"] = [dict(p) for p in content] if keep_parts else "".join(texts)
    elif content is None and role == "assistant" and calls:
        plain["content"] = ""
    elif not isinstance(content, str):
        raise _refusal(f"{where}.content must be text, not {content!r:.80}")
    thought = next((plain[key] for key in REASONING if key in plain), None)
    if thought is not None:
        plain = {"thinking": thought, **plain, "reasoning_content": thought}
    return plain


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise _refusal(f"{where} has type {kind!r}; this model takes text parts only")
    text = part.get("text")
    if not isinstance(text, str):
        raise _refusal(f"{where}.text must be text, not {text!r:.80}")
    return text


def _tool_calls(calls: Any, where: str, role: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise _refusal(f"{where}: only assistant messages have tool calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _refusal(f"{where} must be a list, not {calls!r:.80}")
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _refusal(f"{where} must be an object with function.name and function.arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as exc:
            raise _refusal(f"{where}.function.arguments is not valid JSON: {exc}") from exc
    if not isinstance(arguments, Mapping | None):
        raise _refusal(f"{where}.function.arguments must be a JSON object, not {arguments!r:.80}")
    return {**call, "function": {**function, "arguments": dict(arguments or {})}}


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages")
