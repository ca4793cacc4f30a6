"""Progress of loading, shown where somebody may wait for more than a moment. Torch-free."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

__all__ = ["NoProgress", "Progress", "RichProgress"]


class Progress(Protocol):
    """Counts bytes."""

    def start(self, total: int, label: str) -> None:
        """Begin with `total` bytes to come."""
        ...

    def advance(self, amount: int) -> None:
        """Count `amount` bytes."""
        ...


class NoProgress:
    """Shows nothing."""

    def start(self, total: int, label: str) -> None:
        """Ignore."""

    def advance(self, amount: int) -> None:
        """Ignore."""


class RichProgress:
    """A bar on standard error; on something that is no terminal, one line at the end."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, total: int, label: str) -> None:
        """Show the bar."""
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
        self._bar = Bar(*columns, console=Console(stderr=True))
        self._bar.start()
        self._task = self._bar.add_task(label, total=total)

    def advance(self, amount: int) -> None:
        """Move the bar."""
        self._bar.advance(self._task, amount)
