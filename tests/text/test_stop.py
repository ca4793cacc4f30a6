"""Stop strings: the earliest complete one ends the text, however the text is split."""

from hypothesis import given, settings
from hypothesis import strategies as st

from arbi_core.text.stop import StopStrings, open_suffix

LETTERS = "ab "


def split(data, text):
    at = 0
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        yield text[at : at + size]
        at += size


def expected(text, stops, start=0):
    """End and length of the first stop string that is complete after `start` characters, looking at every character."""
    for end in range(start + 1, len(text) + 1):
        matches = [s for s in stops if text[:end].endswith(s)]
        if matches:
            return end, max(matches, key=len)
    return None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(LETTERS, max_size=30),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    blind=st.integers(0, 12),
    data=st.data(),
)
def test_outcome_does_not_depend_on_the_split(text, stops, include, blind, data):
    matcher = StopStrings(stops, include=include)
    blind = min(blind, len(text))
    out, found = "", None
    for piece in split(data, text[:blind]):
        out += matcher.feed_unheeded(piece)
    for piece in split(data, text[blind:]):
        new, found = matcher.feed(piece)
        out += new
        if found is not None:
            break
    out += matcher.flush()
    match = expected(text, stops, blind)
    if match is None:
        assert (out, found) == (text, None)
    else:
        end, stop = match
        assert found == stop
        assert out == text[: end if include else end - len(stop)]


@settings(max_examples=200, deadline=None)
@given(text=st.text(LETTERS, max_size=20), stops=st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1))
def test_no_more_is_held_back_than_may_become_a_stop_string(text, stops):
    held = open_suffix(text, stops)
    candidates = [n for n in range(1, len(text) + 1) if any(s != text[-n:] and s.startswith(text[-n:]) for s in stops)]
    assert held == max(candidates, default=0)


def test_possible_beginning_is_held_back_and_given_out_when_it_is_none():
    matcher = StopStrings(["END"])
    assert matcher.feed("the E") == ("the ", None)
    assert matcher.feed("N") == ("", None)
    assert matcher.feed("x") == ("ENx", None)


def test_order_of_stop_strings_does_not_matter():
    for stops in (["abcd", "bc"], ["bc", "abcd"]):
        assert StopStrings(stops).feed("xabcdx") == ("xa", "bc")
    assert StopStrings(["b", "ab"]).feed("ab") == ("", "ab")


def test_without_stop_strings_text_passes():
    assert StopStrings([]).feed("x") == ("x", None)
    assert StopStrings([]).feed_unheeded("x") == "x"
