"""What people see while weights load: a bar on a terminal, rare lines elsewhere."""

import io

import pytest
from rich.console import Console

from arbi_core.loader.progress import NoProgress, RichProgress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def progress_on(terminal, clock):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    return RichProgress(console, clock), out


def test_terminal_shows_label_and_bytes(clock):
    progress, out = progress_on(True, clock)
    with progress:
        progress.start(2_000_000, "loading weights")
        progress.advance(500_000)
        progress.advance(1_500_000)
    assert "loading weights" in out.getvalue()
    assert "2.0/2.0 MB" in out.getvalue()


def test_second_job_gets_its_own_bar(clock):
    progress, out = progress_on(True, clock)
    with progress:
        for label in ("first", "second"):
            progress.start(10, label)
            progress.advance(10)
    assert "first" in out.getvalue()
    assert "second" in out.getvalue()


def test_bar_ends_when_loading_fails(clock):
    progress, out = progress_on(True, clock)

    def fail():
        with progress:
            progress.start(10, "loading weights")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    written = out.getvalue()
    progress.advance(1)
    assert out.getvalue() == written


def test_quick_loading_leaves_a_log_alone(clock):
    progress, out = progress_on(False, clock)
    with progress:
        progress.start(10, "loading weights")
        clock.now += 1.9
        progress.advance(10)
    assert out.getvalue() == ""


def test_slow_loading_writes_a_line_now_and_then(clock):
    progress, out = progress_on(False, clock)
    with progress:
        progress.start(4_000_000_000, "loading weights")
        for _ in range(40):
            clock.now += 0.5
            progress.advance(100_000_000)
    assert out.getvalue().splitlines() == [
        "loading weights: 10 % of 4.00 GB",
        "loading weights: 60 % of 4.00 GB",
    ]


def test_nothing_to_load_divides_by_nothing(clock):
    progress, out = progress_on(False, clock)
    progress.start(0, "loading weights")
    clock.now += 3
    progress.advance(0)
    assert "0 %" in out.getvalue()


def test_no_progress_is_silent(capfd):
    progress = NoProgress()
    progress.start(10, "loading weights")
    progress.advance(10)
    assert capfd.readouterr() == ("", "")
