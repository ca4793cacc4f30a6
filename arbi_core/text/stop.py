"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Finds the earliest stop string, holding back text that may be the beginning of one.

    Of several that begin at the same place, the one listed first wins.

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
        found = min(
            ((at, order) for order, s in enumerate(self._stops) if (at := self._held.find(s)) >= 0),
            default=None,
        )
        if found is not None and not self._earlier_may_come(found[0]):
            at, order = found
            stop = self._stops[order]
            out = self._held[: at + len(stop)] if self._include else self._held[:at]
            self._held = ""
            return out, stop
        keep = self._undecided()
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out, None

    def flush(self) -> tuple[str, str | None]:
        """The text is over: return what was held back, and the stop string that it completes, if it does."""
        held, self._held = self._held, ""
        found = min(((at, order) for order, s in enumerate(self._stops) if (at := held.find(s)) >= 0), default=None)
        if found is None:
            return held, None
        stop = self._stops[found[1]]
        return held[: found[0] + (len(stop) if self._include else 0)], stop

    def _undecided(self) -> int:
        """Length of the longest suffix that begins a stop string (which then lies in the future)."""
        start = self._first_open()
        return 0 if start is None else len(self._held) - start

    def _first_open(self) -> int | None:
        """Where the earliest unfinished stop string may begin."""
        text = self._held
        longest = max(len(s) for s in self._stops)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[start:]
            if any(len(s) > len(tail) and s.startswith(tail) for s in self._stops):
                return start
        return None

    def _earlier_may_come(self, at: int) -> bool:
        """Whether a stop string that begins before `at` may still complete."""
        start = self._first_open()
        return start is not None and start < at
