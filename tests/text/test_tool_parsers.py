"""The ``hermes`` parser: whole calls or text, whatever the split."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbi_core.builtin.tool_parsers import HermesParser
from arbi_core.offers import ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse(pieces):
    stream = HermesParser().start()
    parts = [stream.feed(p) for p in pieces] + [stream.flush()]
    calls = [(c.index, c.name, c.arguments) for p in parts for c in p.tool_calls]
    return "".join(p.content for p in parts), calls


def call(body):
    return f"{OPEN}{body}{CLOSE}"


GOOD = call('\n{"name": "f", "arguments": {"a": "é"}}\n')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        ("  text \n", "  text \n", []),
        (GOOD, "", [("f", '{"a": "é"}')]),
        (f"Let me see.\n{GOOD}\n{GOOD}\n done ", "Let me see.done ", [("f", '{"a": "é"}')] * 2),
        (call('{"name": "f"}'), "", [("f", "{}")]),
        (call('{"name": "f", "arguments": null}'), "", [("f", "{}")]),
        (call('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [("f", '{"a": 1}')]),
        (call('{"name": "f", "arguments": "words"}'), "", [("f", '"words"')]),
        (call('{"name": "f", "arguments": {"a": "</tool_call> \\" <tool_call>"}}'), "", [
            ("f", '{"a": "</tool_call> \\" <tool_call>"}')
        ]),
        (call("no json"), call("no json"), []),
        (call('{"name": ""}'), call('{"name": ""}'), []),
        (call('{"arguments": {}}'), call('{"arguments": {}}'), []),
        (call('{"name": "f", "arguments": NaN}'), call('{"name": "f", "arguments": NaN}'), []),
        (call('{"name": "\\ud800"}'), call('{"name": "\\ud800"}'), []),
        (call('{"name": "f", "arguments": {"a": "\\ud800"}}'), "", [("f", '{"a": "\\ud800"}')]),
        (f"{call('{bad')} {GOOD}", call("{bad"), [("f", '{"a": "é"}')]),
        (f'{call("""{"open""")} {GOOD}', call('{"open'), [("f", '{"a": "é"}')]),
        (f"a {OPEN}{{", f"a {OPEN}{{", []),
        (f"a {OPEN} {GOOD}", f"a {OPEN}", [("f", '{"a": "é"}')]),
        ("a <tool_c", "a <tool_c", []),
        ("", "", []),
        (call("[" * 3000), call("[" * 3000), []),
    ],
)  # fmt: skip
def test_calls_and_text(text, content, calls):
    expected = (content, [(i, *c) for i, c in enumerate(calls)])
    assert parse([text]) == expected
    assert parse(list(text)) == expected


FRAGMENTS = [
    OPEN,
    CLOSE,
    GOOD,
    '{"name": "g"}',
    call('{"name": "g"}'),
    '"',
    "\\",
    " ",
    "\n",
    "x",
    "<",
    "tool_call>",
    "{",
]


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12), data=st.data())
def test_outcome_does_not_depend_on_the_split(parts, data):
    text = "".join(parts)
    pieces, at = [], 0
    while at < len(text):
        size = data.draw(st.integers(1, 25))
        pieces.append(text[at : at + size])
        at += size
    content, calls = parse(pieces)
    assert (content, calls) == parse([text])
    assert [index for index, *_ in calls] == list(range(len(calls)))
    assert all(json.loads(arguments) == ({"a": "é"} if name == "f" else {}) for _, name, arguments in calls)
    if not calls:
        assert content == text


def test_text_before_a_call_is_not_held_back():
    stream = HermesParser().start()
    assert stream.feed("Let me see. ").content == "Let me see."
    assert stream.feed("Well <").content == " Well"
    assert stream.feed("b").content == " <b"


def test_templates_are_recognised():
    parser = HermesParser()
    assert isinstance(parser, ToolParser)
    assert parser.detect("... <tool_call>\n{...}\n</tool_call>")
    assert not parser.detect("<tool_call>\n<function=name>")
    assert not parser.detect("plain")
