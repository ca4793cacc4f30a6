"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Ends the text as soon as any stop string is complete, holding back what may be the beginning of one.

    Where two become complete with the same character, the longer one counts.

    Args:
        stops: non-empty strings.
        include: give the matched string out as part of the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take new text; return what may be given out, and the stop string if one is complete."""
        if not self._stops:
            return text, None
        self._held += text
        found = min(((at + len(s), -len(s)) for s in self._stops if (at := self._held.find(s)) >= 0), default=None)
        if found is not None:
            end, length = found[0], -found[1]
            stop = self._held[end - length : end]
            out = self._held[: end if self._include else end - length]
            self._held = ""
            return out, stop
        keep = self._undecided()
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out, None

    def flush(self) -> str:
        """The text is over: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _undecided(self) -> int:
        """Length of the longest suffix that begins a stop string."""
        text = self._held
        longest = max(len(s) for s in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(s.startswith(tail) for s in self._stops):
                return length
        return 0
