"""The ``think`` parser: any split of the text gives the same parts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbi_core.builtin.reasoning_parsers import ThinkParser


def parse(prompt, pieces):
    stream = ThinkParser().start(prompt)
    parts = [stream.feed(p) for p in pieces] + [stream.flush()]
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nhm\n</think>\n\nyes", "hm\n", "yes"),
        ("<think>\n", "hm</think>yes", "hm", "yes"),
        ("<think>\n\n</think>\n", "yes", "", "yes"),
        ("", "plain < answer", "", "plain < answer"),
        ("", "  indented", "", "  indented"),
        ("", "<think>never closed", "never closed", ""),
        ("", "<thin", "", "<thin"),
        ("", "a <think>b</think> c", "", "a <think>b</think> c"),
        ("<user>what is <think>?<assistant>", "a tag", "", "a tag"),
        ("", "", "", ""),
        ("", "<think>a</thinker></think>é🙂", "a</thinker>", "é🙂"),
    ],
)
def test_parts(prompt, text, reasoning, content):
    assert parse(prompt, [text]) == (reasoning, content)
    assert parse(prompt, list(text)) == (reasoning, content)


@settings(max_examples=200, deadline=None)
@given(text=st.text("<>/think \nx", max_size=40), opened=st.booleans(), data=st.data())
def test_parts_do_not_depend_on_the_split(text, opened, data):
    prompt = "<think>" if opened else ""
    pieces, at = [], 0
    while at < len(text):
        step = data.draw(st.integers(1, 7))
        pieces.append(text[at : at + step])
        at += step
    assert parse(prompt, pieces) == parse(prompt, [text])


def test_templates_are_recognised():
    assert ThinkParser().detect("{% if x %}<think></think>{% endif %}")
    assert not ThinkParser().detect("plain")
