"""Tool parser ``hermes``: finds ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` in the answer."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from arbi_core.api import ParsedText, ToolCallDelta, hookimpl
from arbi_core.text.stop import open_suffix

if TYPE_CHECKING:
    from arbi_core.api import ToolParser

__all__ = ["HermesParser"]

arbi_api_version = 1

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION_TAG = "<function="
"""Models that write this inside the same tags use another format."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*("|\Z)', re.DOTALL)


class HermesParser:
    """See `arbi_core.offers.ToolParser`."""

    name = "hermes"

    def detect(self, template: str) -> bool:
        """Templates of models that call tools in this form show it to them."""
        return OPEN in template and FUNCTION_TAG not in template

    def start(self) -> _HermesStream:
        """Begin an answer."""
        return _HermesStream()


class _HermesStream:
    """One answer.

    A call is given out whole once its closing tag has come, so nobody ever sees half of one. What stands between the
    tags and is no call (not JSON, no name) is text like any other, tags included; so is a call that never ends. White
    space next to a call belongs to the call.
    """

    def __init__(self) -> None:
        self._held = ""
        self._count = 0
        self._after_call = False

    def feed(self, text: str) -> ParsedText:
        """See `arbi_core.offers.StreamParser`."""
        self._held += text
        return self._parse(final=False)

    def flush(self) -> ParsedText:
        """See `arbi_core.offers.StreamParser`."""
        return self._parse(final=True)

    def _parse(self, *, final: bool) -> ParsedText:
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        while (start := self._held.find(OPEN)) >= 0:
            end = _body_end(self._held, start + len(OPEN), final=final)
            if end is None:
                break
            call = _call(self._held[start + len(OPEN) : end], self._count)
            if call is None:
                content.append(self._text(self._held[: start + len(OPEN)]))
                self._held = self._held[start + len(OPEN) :]
                continue
            content.append(self._text(self._held[:start].rstrip()))
            calls.append(call)
            self._held = self._held[end + len(CLOSE) :]
            self._count, self._after_call = self._count + 1, True
        else:
            start = len(self._held) - open_suffix(self._held, (OPEN,))
        cut = len(self._held) if final else len(self._held[:start].rstrip())
        content.append(self._text(self._held[:cut]))
        self._held = self._held[cut:]
        return ParsedText(content="".join(content), tool_calls=tuple(calls))

    def _text(self, text: str) -> str:
        """Text for the user; white space that follows a call is dropped."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text


def _body_end(text: str, start: int, *, final: bool) -> int | None:
    """Where the closing tag of the call that begins at `start` stands; None if it has not come.

    A tag inside a JSON string is a part of an argument. If the text is over and a string is still open, the quotes mean
    nothing and the first tag counts.
    """
    at = start
    while (close := text.find(CLOSE, at)) >= 0:
        quote = text.find('"', at)
        if quote < 0 or quote > close:
            return close
        string = STRING.match(text, quote)
        if string is None or not string[1]:
            break
        at = string.end()
    if not final:
        return None
    first = text.find(CLOSE, start)
    return first if first >= 0 else None


def _call(body: str, index: int) -> ToolCallDelta | None:
    """The call that the text between the tags describes; None if it is none."""
    call = _json(body)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = {} if call.get("arguments") is None else call["arguments"]
    if isinstance(arguments, str) and isinstance(_json(arguments), dict):
        text = arguments
    else:
        text = json.dumps(arguments, ensure_ascii=not _is_unicode(json.dumps(arguments, ensure_ascii=False)))
    return ToolCallDelta(index, call["name"], text) if _is_unicode(call["name"] + text) else None


def _json(text: str) -> Any:
    """The JSON value; None where the text is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # Python reads NaN and Infinity, JSON does not have them


def _is_unicode(text: str) -> bool:
    """Whether the text can be sent: JSON escapes may spell half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@hookimpl
def arbi_tool_parsers() -> list[ToolParser]:
    """Offer it."""
    return [HermesParser()]
