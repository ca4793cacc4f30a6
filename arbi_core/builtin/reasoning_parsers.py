"""Reasoning parser ``think``: splits ``<think>...</think>`` from the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arbi_core.api import ParsedText, hookimpl
from arbi_core.text.stop import open_suffix

if TYPE_CHECKING:
    from arbi_core.api import ReasoningParser

__all__ = ["ThinkParser"]

arbi_api_version = 1

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """See `arbi_core.offers.ReasoningParser`."""

    name = "think"

    def detect(self, template: str) -> bool:
        """Templates of models that think in these tags mention them."""
        return CLOSE in template

    def start(self, rendered_prompt: str) -> _ThinkStream:
        """Begin inside the thinking part if the prompt ends with its opening tag.

        Only the end counts: the messages of the prompt may talk about the tags.
        """
        return _ThinkStream(inside=rendered_prompt.rstrip().endswith(OPEN))


class _ThinkStream:
    """One answer. States: before any text, inside the thinking part, after it."""

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        self._may_open = not inside
        self._trim = inside
        self._held = ""

    def feed(self, text: str) -> ParsedText:
        """See `arbi_core.offers.StreamParser`."""
        self._held += text
        content, reasoning = "", ""
        while True:
            if self._may_open:
                stripped = self._held.lstrip()
                if not stripped or (OPEN.startswith(stripped) and stripped != OPEN):
                    break
                self._may_open = False
                if stripped.startswith(OPEN):
                    self._inside, self._trim, self._held = True, True, stripped[len(OPEN) :]
            if self._inside:
                thought, closed = self._take_until_close()
                reasoning += thought
                if not closed:
                    break
                self._inside, self._trim = False, True
            else:
                content += self._take()
                break
        return ParsedText(content=content, reasoning=reasoning)

    def flush(self) -> ParsedText:
        """See `arbi_core.offers.StreamParser`."""
        held, self._held = self._held, ""
        if self._inside:
            return ParsedText(reasoning=held)
        return ParsedText(content=held if self._may_open or not self._trim else held.lstrip("\n"))

    def _take_until_close(self) -> tuple[str, bool]:
        """Thinking text that is certain, and whether its end has been seen."""
        at = self._held.find(CLOSE)
        if at >= 0:
            thought, self._held = self._held[:at], self._held[at + len(CLOSE) :]
            return self._trimmed(thought), True
        cut = len(self._held) - open_suffix(self._held, (CLOSE,))
        thought, self._held = self._held[:cut], self._held[cut:]
        return self._trimmed(thought), False

    def _take(self) -> str:
        text, self._held = self._held, ""
        return self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        """Drop the line breaks that follow a tag."""
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        return text


@hookimpl
def arbi_reasoning_parsers() -> list[ReasoningParser]:
    """Offer it."""
    return [ThinkParser()]
