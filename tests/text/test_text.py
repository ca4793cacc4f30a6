"""Tokenizer, detokenizer, stop strings, chat templates, assembler."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arbi_core import SamplingParams
from arbi_core.engine.messages import FinishOut, FinishReason, TokenLogprobs, TokenOut
from arbi_core.errors import CheckpointError, RequestError
from arbi_core.loader.base import TokenizerParts
from arbi_core.text.assembler import OutputAssembler
from arbi_core.text.chat import encode_chat, normalize_messages, render_chat
from arbi_core.text.detokenizer import IncrementalDetokenizer
from arbi_core.text.stop import StopStrings
from arbi_core.text.tokenizer import Tokenizer
from support.tokenizers import CORPUS, TEMPLATE, byte_level, sentencepiece_like

BYTES = Tokenizer(TokenizerParts(byte_level(), "<s>", "</s>", {"default": TEMPLATE}))
SPM = Tokenizer(TokenizerParts(sentencepiece_like(), "<s>", "</s>"))
KINDS = {"byte-level": BYTES, "sentencepiece": SPM}


@pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_streamed_text_equals_decoding_at_once(tokenizer, data):
    """Any ids, in any pieces: the joined pieces are the whole text, and no piece but the last ends mid-character."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    skip = data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces, at = [], 0
    while at < len(ids):
        step = data.draw(st.integers(1, 5))
        pieces.append(detokenizer.push(ids[at : at + step]))
        at += step
    pieces.append(detokenizer.flush())
    kept = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    whole = tokenizer.decode(kept, skip_special_tokens=False)
    # Decoded at once, one bad byte spoils the whole run of byte tokens around it; a stream has shown what was whole.
    assume(tokenizer is BYTES or "\ufffd" not in whole)
    assert "".join(pieces) == whole


@pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)
def test_multibyte_characters_never_arrive_in_halves(tokenizer):
    text = "naïve ☕ 東京 🙂 end"
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([i]) for i in tokenizer.encode(text)] + [detokenizer.flush()]
    assert not any("\ufffd" in p for p in pieces)
    assert "".join(pieces).strip() == text


def test_long_generation_keeps_its_text():
    ids = BYTES.encode(" ".join(CORPUS) * 20)
    detokenizer = IncrementalDetokenizer(BYTES)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == BYTES.decode(ids)


def test_token_bytes_join_to_the_text():
    text = "déjà vu 🙂"
    assert b"".join(BYTES.token_bytes(i) for i in BYTES.encode(text)) == text.encode()
    assert SPM.token_bytes(SPM.encode("\n", add_special_tokens=False)[-1]) == b"\n"
    assert BYTES.token_bytes(10**6) == b""


def test_token_ids_out_of_range_are_refused():
    with pytest.raises(RequestError, match="-1 is not in the vocabulary"):
        BYTES.decode([-1])


def test_special_tokens_are_known_by_name():
    assert BYTES.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert BYTES.eos_token_id in BYTES.special_ids


# -- stop strings -----------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab ", max_size=30),
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    data=st.data(),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_split(text, stops, include, data):
    first = min(((i + len(s), -len(s)) for s in stops if (i := text.find(s)) >= 0), default=None)
    matcher = StopStrings(stops, include=include)
    out, found, i = "", None, 0
    while i < len(text) and found is None:
        step = data.draw(st.integers(1, 4))
        piece, found = matcher.feed(text[i : i + step])
        out += piece
        i += step
    if found is None:
        out += matcher.flush()
    if first is None:
        assert (out, found) == (text, None)
    else:
        stop_at, length = first[0], -first[1]
        assert found == text[stop_at - length : stop_at]
        assert out == text[: stop_at if include else stop_at - length]


def test_possible_beginning_is_held_back():
    matcher = StopStrings(["END"])
    assert matcher.feed("the E") == ("the ", None)
    assert matcher.feed("N") == ("", None)
    assert matcher.feed("x") == ("ENx", None)


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat_is_rendered_and_encoded_without_a_second_begin_token():
    ids = encode_chat(BYTES, [{"role": "user", "content": "hi"}])
    assert BYTES.decode(ids, skip_special_tokens=False) == "<|user|>hi<|end|><|assistant|>"


def test_text_parts_are_joined():
    (message,) = normalize_messages(
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    )
    assert message["content"] == "ab"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ([{"role": "wizard", "content": "x"}], "messages\\[0\\].role is 'wizard'"),
        ([{"role": "user"}], "messages\\[0\\].content must be text"),
        ([{"role": "user", "content": 5}], "messages\\[0\\].content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content\\[0\\] has type 'image_url'"),
        (["hello"], "messages\\[0\\] must be an object"),
    ],
)
def test_bad_messages_are_refused_by_place(messages, says):
    with pytest.raises(RequestError, match=says):
        render_chat(BYTES, messages)


def test_model_without_template_says_so():
    with pytest.raises(RequestError, match="no chat template"):
        render_chat(SPM, [{"role": "user", "content": "x"}])


def test_template_may_refuse_and_may_be_broken():
    chat = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="only systems"):
        render_chat(BYTES, chat, template="{{ raise_exception('only systems') }}")
    with pytest.raises(CheckpointError, match="not valid Jinja: line 1"):
        render_chat(BYTES, chat, template="{% for %}")
    with pytest.raises(RequestError, match="more than"):
        render_chat(BYTES, chat, template="{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}")


def test_template_cannot_reach_python():
    with pytest.raises(RequestError, match="unsafe"):
        render_chat(BYTES, [{"role": "user", "content": "x"}], template="{{ ''.__class__.__mro__ }}")


def test_template_variables_reach_the_template():
    chat = [{"role": "user", "content": "x"}]
    assert render_chat(BYTES, chat, template="{{ mood }}{{ bos_token }}", variables={"mood": "good"}) == "good<s>"
    with pytest.raises(RequestError, match="messages cannot be set"):
        render_chat(BYTES, chat, variables={"messages": []})


def test_tojson_and_generation_tags_work_as_models_expect():
    template = "{% generation %}{{ messages[0] | tojson }}{% endgeneration %}"
    assert (
        render_chat(BYTES, [{"role": "user", "content": "é<"}], template=template)
        == '{"role": "user", "content": "é<"}'
    )


# -- assembler --------------------------------------------------------------------------------------------------------


def end(reason=FinishReason.LENGTH, count=0, **options):
    return FinishOut(request_id="r", reason=reason, prompt_tokens=3, completion_tokens=count, **options)


def test_stop_string_ends_the_text_and_bills_up_to_it():
    ids = BYTES.encode("one STOP two")
    assembler = OutputAssembler(BYTES, SamplingParams(stop="STOP"))
    text = ""
    for i in ids:
        delta = assembler.tokens(TokenOut("r", (i,)))
        if delta is None:
            break
        text += delta.text
    assert assembler.stopped
    last = assembler.finish(end(FinishReason.CANCELLED, len(ids), cached_tokens=2))
    assert text + last.text == "one "
    assert last.finish.reason is FinishReason.STOP
    assert last.finish.stop == "STOP"
    assert last.finish.completion_tokens == len(BYTES.encode("one STOP"))
    assert last.finish.cached_tokens == 2


def test_held_back_text_is_given_out_at_the_end():
    assembler = OutputAssembler(BYTES, SamplingParams(stop="STOP"))
    text = "".join(assembler.tokens(TokenOut("r", (i,))).text for i in BYTES.encode("one ST"))
    assert text + assembler.finish(end()).text == "one ST"


def test_stop_token_is_counted_and_not_shown():
    assembler = OutputAssembler(BYTES, SamplingParams())
    (a, b) = (BYTES.encode("a")[0], BYTES.encode("b")[0])
    first = assembler.tokens(TokenOut("r", (a,)))
    second = assembler.tokens(TokenOut("r", (b,)), stop_token_id=b)
    last = assembler.finish(end(FinishReason.STOP, 2, stop_token_id=b))
    assert (first.text, second.text, second.token_ids) == ("a", "", (b,))
    assert (last.finish.stop, last.finish.completion_tokens) == (b, 2)


def test_stop_strings_wait_for_min_tokens():
    ids = BYTES.encode("x x x")
    assembler = OutputAssembler(BYTES, SamplingParams(stop="x", min_tokens=1))
    text = assembler.tokens(TokenOut("r", (ids[0],))).text
    assert text == "x"
    assert not assembler.stopped


def test_without_detokenization_only_ids_pass():
    entry = TokenLogprobs(5, -0.1, 1)
    assembler = OutputAssembler(BYTES, SamplingParams(detokenize=False))
    delta = assembler.tokens(TokenOut("r", (5,), (entry,)))
    assert (delta.text, delta.token_ids, delta.logprobs) == ("", (5,), (entry,))
