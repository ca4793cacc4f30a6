"""Chat templates: what messages become, what is refused, and the bounds of a template."""

import pytest

from arbi_core.errors import CheckpointError, RequestError
from arbi_core.loader.base import TokenizerParts
from arbi_core.text import jinja_env
from arbi_core.text.chat import encode_chat, normalize_messages, render_chat
from arbi_core.text.tokenizer import Tokenizer
from support.tokenizers import TEMPLATE, byte_level, sentencepiece_like

BYTES = Tokenizer(TokenizerParts(byte_level(), "<s>", "</s>", {"default": TEMPLATE}))
SPM = Tokenizer(TokenizerParts(sentencepiece_like(), "<s>", "</s>"))
HI = [{"role": "user", "content": "hi"}]
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
LOOPING = "{% for m in messages %}{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% set c = m.content %}{% if c is string %}{{ c }}"
    "{% else %}{% for p in c %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def render(template, messages=HI, **options):
    return render_chat(BYTES, messages, template=template, **options)


def test_chat_is_rendered_and_encoded_without_a_second_begin_token():
    ids = encode_chat(BYTES, HI)
    assert BYTES.decode(ids, skip_special_tokens=False) == "<|user|>hi<|end|><|assistant|>"
    ids = encode_chat(BYTES, HI, template="{{ bos_token }}{{ messages[0].content }}")
    assert ids.count(BYTES.bos_token_id) == 1


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (PLAIN, PARTS, "user:ab;"),
        (PLAIN, "x", "user:x;"),
        (LOOPING, PARTS, "[a][b]"),
        (LOOPING, "x", "[x]"),
        (BOTH, PARTS, "[a][b]"),
        (BOTH, "x", "x"),
    ],
)
def test_content_has_the_form_that_the_template_reads(template, content, text):
    assert render(template, [{"role": "user", "content": content}]) == text


def test_developer_is_system_for_templates_that_do_not_know_it():
    message = [{"role": "developer", "content": "x"}]
    assert render(PLAIN, message) == "system:x;"
    assert render("{# developer #}" + PLAIN, message) == "developer:x;"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ([{"role": "wizard", "content": "x"}], r"messages\[0\].role is 'wizard'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\].role is \['user'\]"),
        ([{"role": "user"}], r"messages\[0\].content must be text, not None"),
        ([{"role": "assistant", "content": None}], r"messages\[0\].content must be text, not None"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be text, not 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] has type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] has type None"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be text"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "only assistant messages"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], r"messages\[0\].tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": ["x"]}], r"tool_calls\[0\] must be an object"),
    ],
)
def test_bad_messages_are_refused_by_place(messages, says):
    for template in (None, LOOPING):
        with pytest.raises(RequestError, match=says) as caught:
            render(template, messages)
        assert caught.value.param == "messages"


def call(arguments):
    return [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": arguments}]}]


def test_tool_calls_carry_their_arguments_as_objects():
    (message,) = normalize_messages(call({"name": "f", "arguments": '{"a": "é"}'}))
    assert message["content"] == ""
    assert message["tool_calls"][0] == {"id": "1", "function": {"name": "f", "arguments": {"a": "é"}}}
    assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", call({"name": "f"})) == "{}"


@pytest.mark.parametrize(
    ("arguments", "says"), [("{a}", "not valid JSON"), ("[1]", r"must be a JSON object, not \[1\]")]
)
def test_bad_arguments_are_refused_by_place(arguments, says):
    with pytest.raises(RequestError, match=rf"messages\[0\].tool_calls\[0\].function.arguments (is )?{says}"):
        normalize_messages(call({"name": "f", "arguments": arguments}))


def test_messages_of_the_caller_are_left_alone():
    messages = [{"role": "developer", "content": PARTS, "name": None}]
    render(PLAIN, messages)
    assert messages == [{"role": "developer", "content": PARTS, "name": None}]


def test_reasoning_is_found_under_every_name():
    for name in ("reasoning", "reasoning_content", "thinking"):
        (message,) = normalize_messages([{"role": "assistant", "content": "x", name: "hm"}])
        assert (message["thinking"], message["reasoning_content"]) == ("hm", "hm")


# -- templates ------------------------------------------------------------------------------------------------------


def test_missing_template_is_said_and_never_replaced():
    with pytest.raises(RequestError, match="no chat template"):
        render_chat(SPM, HI)
    named = Tokenizer(TokenizerParts(byte_level(), chat_templates={"rag": "x", "tool_use": "{{ tools | length }}"}))
    with pytest.raises(RequestError, match="no default chat template, only rag, tool_use"):
        render_chat(named, HI)
    assert render_chat(named, HI, tools=[{"type": "function"}]) == "1"


def test_broken_template_is_named():
    broken = Tokenizer(TokenizerParts(byte_level(), chat_templates={"default": "a\n{% for %}"}))
    with pytest.raises(CheckpointError, match="chat template 'default' is not valid Jinja: line 2"):
        render_chat(broken, HI)
    for source in ("{% for %}", "{{ 1 | nofilter }}", "{{" + "(" * 900 + "1" + ")" * 900 + "}}"):
        with pytest.raises(RequestError, match="chat_template is not valid Jinja: line 1"):
            render(source)


def test_template_may_refuse_and_may_fail():
    with pytest.raises(RequestError, match="refuses these messages: only systems"):
        render("{{ raise_exception('only systems') }}")
    with pytest.raises(RequestError, match="fails on these messages: 'x' is undefined"):
        render("{{ x.y.z }}")


@pytest.mark.parametrize(
    "attack", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"]
)
def test_template_cannot_reach_python_or_change_messages(attack):
    with pytest.raises(RequestError, match="unsafe|not safely"):
        render(attack)


def test_template_variables_reach_the_template():
    assert render("{{ mood }}{{ bos_token }}", variables={"mood": "good"}) == "good<s>"
    assert render("{{ bos_token }}", variables={"bos_token": "<mine>"}) == "<mine>"
    assert render("{{ documents[0].title }}", documents=[{"title": "t"}]) == "t"
    assert render("{{ tools is none }}{{ pad_token }}") == "True"
    for own in ("messages", "documents"):
        with pytest.raises(RequestError, match=f"{own} cannot be set"):
            render(PLAIN, variables={own: []})


def test_extensions_work_as_templates_expect():
    assert render(
        "{% generation %}{{ messages[0] | tojson }}{% endgeneration %}", [{"role": "user", "content": "é<"}]
    ) == ('{"role": "user", "content": "é<"}')
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_loops_and_joins_keep_their_meaning_under_the_bounds():
    template = (
        "{% for x in [1, 2, 3] %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k ~ v ~ none }}{% else %}never{% endfor %}"
        "{% for x in nothing %}{% else %}empty{% endfor %}"
        "{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
        "{{ ['a', 'b'] | join(', ') }}{{ [{'n': 1}] | join(attribute='n') }}{{ 'aXb' | replace('X', '-') }}"
        "{{ '%03d' % 7 }}{{ '{:>3}'.format('a') }}{{ 'a\nb' | indent(1) }}{{ ','.join(['p', 'q']) }}{{ 'a' * 3 }}"
    )
    assert render(template) == ("1False32False313True32a1Noneempty12a, b1a-b007  aa\n bp,qaaa")


@pytest.mark.parametrize(
    "bomb",
    [
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ 'x' * 10**12 }}",
        "{{ ['x'] * 10**12 }}",
        "{{ 2 ** 999999999 }}",
        "{{ 'x'.ljust(10**12) }}",
        "{{ 'x' | center(width=10**12) }}",
        "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
        "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
        "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ (['x' * 999999] * 999) | join }}",
        "{{ ','.join(['x' * 999999] * 999) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '%*d' | format(10**11, 1) }}",
        "{{ '{:>99999999999}'.format(1) }}",
    ],
)
def test_template_cannot_make_more_text_than_a_prompt_holds(bomb):
    with pytest.raises(RequestError, match="more than 16777216 characters"):
        render(bomb)


@pytest.mark.parametrize(
    "endless",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_template_cannot_run_for_ever(endless, monkeypatch):
    monkeypatch.setattr(jinja_env, "MAX_SECONDS", 0.05)
    with pytest.raises(RequestError, match="takes more than 0.05 seconds"):
        render(endless)


def test_template_that_calls_itself_without_end_is_stopped():
    with pytest.raises(RequestError, match="calls itself without end"):
        render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
