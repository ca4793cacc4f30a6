"""Traces: which requests arrive when, how long they are, and what they share. One JSON object a line.

The tokens of a request are not recorded. They follow from names: the token at a position is determined by the position
and by the segment of `prefix` that covers it, or, behind the prefix and in the output, by the request's `stream`. Two
requests that name the same segments or streams thus share a prefix, and a later turn of a conversation (same stream,
longer prompt) repeats the earlier prompt and answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, field, fields, frozen

from arbi_core.engine.messages import Priority
from arbi_core.errors import ConfigError

__all__ = ["Stream", "TraceRequest", "check_trace", "read_trace", "write_trace"]


def _segments(value: Iterable[Sequence[Any]]) -> tuple[tuple[str, int], ...]:
    return tuple((str(name), int(tokens)) for name, tokens in value)


@frozen(kw_only=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        id: unique; `read_trace` fills in the line number where it is missing.
        arrival_s: seconds from the start of the trace; with `after`, from the end of that request.
        prompt_tokens: length of the prompt.
        output_tokens: tokens that it generates unless it is cancelled: the simulated model never stops earlier.
        prefix: ``(name, tokens)`` segments that the prompt begins with; a segment of the same name at the same place is
            the same text.
        stream: name of the text behind the prefix, the output included; empty: nobody else's.
        tenant: who asks.
        priority: scheduling class.
        cancel_after_s: seconds after its arrival at which the client goes away; None never.
        timeout_s: seconds after its arrival at which the engine ends it; None never.
        after: id of a request that must end first, as a turn of a conversation waits for the one before.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[tuple[str, int], ...] = field(default=(), converter=_segments)
    stream: str = ""
    tenant: str = ""
    priority: Priority = field(default=Priority.INTERACTIVE, converter=Priority)
    cancel_after_s: float | None = None
    timeout_s: float | None = None
    after: str | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("arrival_s", "cancel_after_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and type(value) not in {int, float}:
                raise ValueError(f"{name} must be a number, not {value!r}")
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; it must be at least 0")
        counts = (self.prompt_tokens, self.output_tokens, *(n for _, n in self.prefix))
        if not all(type(n) is int for n in counts):
            raise ValueError("numbers of tokens must be whole")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("prompt_tokens and output_tokens must be at least 1")
        if min((n for _, n in self.prefix), default=0) < 0 or sum(n for _, n in self.prefix) > self.prompt_tokens:
            raise ValueError("the segments of prefix must not be negative, nor longer together than the prompt")

    @property
    def total_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_tokens + self.output_tokens


class Stream:
    """Gives names their tokens: consecutive ids, so that text costs nothing to make and never repeats by chance."""

    SPAN = 1 << 24
    """Positions of one text."""

    def __init__(self) -> None:
        self._bases: dict[str, int] = {}

    def base(self, name: str) -> int:
        """Id of a text's token at position 0."""
        return self._bases.setdefault(name, len(self._bases) * self.SPAN)

    def own(self, request: TraceRequest) -> int:
        """Base of the text behind the request's prefix."""
        return self.base(f"stream/{request.stream}" if request.stream else f"request/{request.id}")

    def prompt(self, request: TraceRequest) -> tuple[int, ...]:
        """Token ids of a request's prompt."""
        ids: list[int] = []
        for name, tokens in request.prefix:
            start = self.base(f"segment/{name}") + len(ids)
            ids.extend(range(start, start + tokens))
        start = self.own(request)
        ids.extend(range(start + len(ids), start + request.prompt_tokens))
        return tuple(ids)


def check_trace(requests: Sequence[TraceRequest], where: str) -> None:
    """Verify that ids are unique and that every `after` names an earlier request.

    Raises:
        ConfigError: they are not, or the trace is empty.
    """
    if not requests:
        raise ConfigError(where, "the trace holds no request")
    seen: set[str] = set()
    for request in requests:
        if request.id in seen:
            raise ConfigError(where, f"two requests have the id {request.id!r}")
        if request.after is not None and request.after not in seen:
            raise ConfigError(where, f"request {request.id!r} waits for {request.after!r}, which no line above it has")
        seen.add(request.id)


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace file: one JSON object a line, with the fields of `TraceRequest`; empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as exc:
        raise ConfigError("trace", f"{path} cannot be read: {exc.strerror}") from None
    except UnicodeDecodeError as exc:
        raise ConfigError("trace", f"{path} is no text in UTF-8: byte {exc.start} is wrong") from None
    requests = [_parse(f"{path}:{n}", n, line) for n, line in enumerate(lines, 1) if line.strip()]
    check_trace(requests, str(path))
    return requests


def _parse(where: str, number: int, line: str) -> TraceRequest:
    names = [f.name for f in fields(TraceRequest)]
    try:
        entry = json.loads(line)
    except ValueError as exc:
        raise ConfigError(where, f"no JSON: {exc}") from None
    if not isinstance(entry, Mapping):
        raise ConfigError(where, "not an object", "for example " + json.dumps(_EXAMPLE))
    unknown = sorted(set(entry) - set(names))
    if unknown:
        raise ConfigError(where, f"{unknown[0]!r} is no field of a request", "one of: " + ", ".join(names))
    missing = sorted({"arrival_s", "prompt_tokens", "output_tokens"} - set(entry))
    if missing:
        raise ConfigError(where, f"{missing[0]} is missing")
    try:
        return TraceRequest(**{"id": str(number), **entry})
    except (ValueError, TypeError) as exc:
        raise ConfigError(where, str(exc)) from None


_EXAMPLE = {"arrival_s": 0.5, "prompt_tokens": 900, "output_tokens": 120}


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace file; fields that have their default are left out."""
    defaults = {f.name: f.default for f in fields(TraceRequest)}
    with path.open("w", encoding="utf-8") as out:
        for request in requests:
            entry = {k: v for k, v in asdict(request).items() if v != defaults[k]}
            out.write(json.dumps(entry) + "\n")
