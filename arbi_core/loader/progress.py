"""Progress of loading, shown where somebody may wait for more than a moment. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    import rich.console
    import rich.progress

__all__ = ["NoProgress", "Progress", "RichProgress"]

PATIENCE_S = 2.0
"""Without a terminal nothing is said before so many seconds have passed."""
REPEAT_S = 10.0
"""Seconds between two lines without a terminal."""


class Progress(Protocol):
    """Counts bytes. It is called from one thread."""

    def start(self, total: int, label: str) -> None:
        """Begin with `total` bytes to come; a second start begins another job."""
        ...

    def advance(self, amount: int) -> None:
        """Count `amount` bytes of the job that started last."""
        ...


class NoProgress:
    """Shows nothing."""

    def start(self, total: int, label: str) -> None:
        """Ignore."""

    def advance(self, amount: int) -> None:
        """Ignore."""


class RichProgress:
    """A bar on a terminal; elsewhere, such as in a log, a line now and then while loading takes long.

    Args:
        console: where to write; standard error by default.
        clock: seconds.
    """

    def __init__(
        self, console: rich.console.Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        from rich.console import Console

        self._console = console or Console(stderr=True)
        self._clock = clock
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        self._label = ""
        self._done = self._total = 0
        self._next_line = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def start(self, total: int, label: str) -> None:
        """Show the bar."""
        self._done, self._total, self._label = 0, total, label
        self._next_line = self._clock() + PATIENCE_S
        if not self._console.is_terminal:
            return
        if self._bar is None:
            self._bar = self._make_bar()
            self._bar.start()
        self._task = self._bar.add_task(label, total=total)

    def advance(self, amount: int) -> None:
        """Move the bar, or write a line when one is due."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, amount)
            return
        self._done += amount
        now = self._clock()
        if now < self._next_line:
            return
        self._next_line = now + REPEAT_S
        share = 100 * self._done // max(self._total, 1)
        self._console.print(f"{self._label}: {share} % of {self._total / 1e9:.2f} GB", highlight=False)

    def _make_bar(self) -> rich.progress.Progress:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
        return Progress(*columns, console=self._console)
