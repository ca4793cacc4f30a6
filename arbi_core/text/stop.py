"""Stop strings in streamed text, and the part of a text that may yet become a marker."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings", "open_suffix"]


def open_suffix(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that begins one of `markers` without completing it; 0 if there is none.

    Markers are not empty.
    """
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest


class StopStrings:
    """Ends the text as soon as any stop string is complete, holding back what may be the beginning of one.

    Where several stop strings occur, the one that is complete first counts, as in an engine that looks after every
    character; where two become complete with the same character, the longer one counts. The outcome therefore does not
    depend on how the text is split, nor on the order of `stops`.

    Args:
        stops: non-empty strings.
        include: give the matched string out as part of the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._blind = 0

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take new text; return what may be given out, and the stop string if one is complete."""
        if not self._stops:
            return text, None
        self._held += text
        found = min(self._ends(), default=None)
        if found is None:
            return self._certain(), None
        end, length = found[0], -found[1]
        stop = self._held[end - length : end]
        out = self._held[: end if self._include else end - length]
        self._held = ""
        return out, stop

    def feed_unheeded(self, text: str) -> str:
        """Take new text in which a stop string may begin but not become complete; return what may be given out."""
        if not self._stops:
            return text
        self._held += text
        self._blind = len(self._held)
        return self._certain()

    def flush(self) -> str:
        """The text is over: return what was held back."""
        held, self._held, self._blind = self._held, "", 0
        return held

    def _ends(self) -> list[tuple[int, int]]:
        """End and negative length of the first occurrence of each stop string that ends in heeded text."""
        found = ((self._held.find(s, max(0, self._blind + 1 - len(s))), len(s)) for s in self._stops)
        return [(at + length, -length) for at, length in found if at >= 0]

    def _certain(self) -> str:
        """Give out all but the suffix that may begin a stop string."""
        cut = len(self._held) - open_suffix(self._held, self._stops)
        out, self._held = self._held[:cut], self._held[cut:]
        self._blind = max(0, self._blind - cut)
        return out
