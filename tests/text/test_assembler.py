"""From the engine's messages to what the reader of one completion sees."""

from hypothesis import given, settings
from hypothesis import strategies as st

from arbi_core import SamplingParams
from arbi_core.engine.messages import FinishOut, FinishReason, TokenLogprobs, TokenOut
from arbi_core.loader.base import TokenizerParts
from arbi_core.text.assembler import OutputAssembler
from arbi_core.text.tokenizer import Tokenizer
from support.tokenizers import byte_level, sentencepiece_like

BYTES = Tokenizer(TokenizerParts(byte_level(), "<s>", "</s>"))
SPM = Tokenizer(TokenizerParts(sentencepiece_like(), "<s>", "</s>"))


def end(reason=FinishReason.LENGTH, count=0, **options):
    return FinishOut(request_id="r", reason=reason, prompt_tokens=3, completion_tokens=count, **options)


def run(ids, sampling, *, sizes=(), reason=FinishReason.LENGTH, tokenizer=BYTES):
    """All deltas of a completion whose engine never hears of stop strings."""
    assembler = OutputAssembler(tokenizer, sampling, index=1)
    deltas, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        if at < len(ids):
            delta = assembler.tokens(TokenOut("r", tuple(ids[at : at + size])))
            deltas += [] if delta is None else [delta]
            at += size
    deltas.append(assembler.finish(end(reason, len(ids), cached_tokens=2)))
    return deltas


def text_of(deltas):
    return "".join(d.text for d in deltas)


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    stops=st.lists(st.sampled_from(["a", " th", "é", "🙂", "e q", "</s>", "\n"]), max_size=2),
    include=st.booleans(),
    skip=st.booleans(),
    minimum=st.integers(0, 6),
)
def test_split_of_the_tokens_changes_nothing(data, stops, include, skip, minimum):
    ids = data.draw(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=30))
    ids += BYTES.encode(data.draw(st.sampled_from(["the quick 🙂", "naïve a", ""])))
    sampling = SamplingParams(
        stop=stops, include_stop_str_in_output=include, skip_special_tokens=skip, min_tokens=minimum, max_tokens=None
    )
    sizes = data.draw(st.lists(st.integers(1, 6), max_size=len(ids)))
    one, other = run(ids, sampling), run(ids, sampling, sizes=sizes)
    assert text_of(one) == text_of(other)
    assert one[-1].finish == other[-1].finish
    tokens = [t for d in other for t in d.token_ids]
    assert tokens == ids[: len(tokens)]
    assert one[-1].finish.completion_tokens == len(tokens)
    if one[-1].finish.stop is None:
        assert text_of(one) == BYTES.decode(ids, skip_special_tokens=skip)
        assert tokens == ids
    assert all(d.index == 1 for d in one)


def test_stop_string_ends_the_text_and_bills_up_to_it():
    ids = BYTES.encode("one STOP two")
    deltas = run(ids, SamplingParams(stop="STOP"), reason=FinishReason.CANCELLED)
    assert text_of(deltas) == "one "
    finish = deltas[-1].finish
    assert (finish.reason, finish.stop, finish.cached_tokens) == (FinishReason.STOP, "STOP", 2)
    assert finish.completion_tokens == len(BYTES.encode("one STOP"))


def test_tokens_after_a_stop_string_are_dropped_within_one_message_too():
    ids = BYTES.encode("one STOP two")
    assembler = OutputAssembler(BYTES, SamplingParams(stop="STOP", include_stop_str_in_output=True))
    scores = tuple(TokenLogprobs(t, -1.0, 1) for t in ids)
    delta = assembler.tokens(TokenOut("r", tuple(ids), scores))
    assert (delta.text, len(delta.token_ids)) == ("one STOP", len(BYTES.encode("one STOP")))
    assert len(delta.logprobs) == len(delta.token_ids)
    assert assembler.stopped
    assert assembler.tokens(TokenOut("r", tuple(ids))) is None


def test_complete_answer_stays_one_whatever_the_engine_reports_afterwards():
    for reason in FinishReason:
        finish = run(BYTES.encode("one STOP"), SamplingParams(stop="STOP"), reason=reason)[-1].finish
        assert (finish.reason, finish.stop) == (FinishReason.STOP, "STOP")


def test_held_back_text_is_given_out_at_the_end():
    assert text_of(run(BYTES.encode("one ST"), SamplingParams(stop="STOP"))) == "one ST"


def test_stop_string_may_end_in_the_unfinished_character_that_the_end_reveals():
    half = BYTES.encode("a") + BYTES.encode("🙂")[:1]
    finish = run(half, SamplingParams(stop="\ufffd"))[-1].finish
    assert (finish.reason, finish.stop) == (FinishReason.STOP, "\ufffd")
    assert run(half, SamplingParams(stop="\ufffd", min_tokens=2))[-1].finish.stop is None


def test_stop_token_is_counted_and_not_shown():
    assembler = OutputAssembler(BYTES, SamplingParams())
    (a, b) = (BYTES.encode("a")[0], BYTES.encode("b")[0])
    first = assembler.tokens(TokenOut("r", (a,)))
    second = assembler.tokens(TokenOut("r", (b,)), stop_token_id=b)
    last = assembler.finish(end(FinishReason.STOP, 2, stop_token_id=b))
    assert (first.text, second.text, second.token_ids) == ("a", "", (b,))
    assert (last.finish.stop, last.finish.completion_tokens) == (b, 2)


def test_error_keeps_its_detail_and_the_text_so_far():
    assembler = OutputAssembler(BYTES, SamplingParams(stop="xy"))
    assert assembler.tokens(TokenOut("r", tuple(BYTES.encode("x")))).text == ""
    last = assembler.finish(end(FinishReason.ERROR, detail="boom"))
    assert (last.text, last.finish.reason, last.finish.detail) == ("x", FinishReason.ERROR, "boom")


def test_stop_strings_wait_for_min_tokens_but_may_begin_before():
    ids = [BYTES.encode(c)[0] for c in "xyxyz"]
    assert text_of(run(ids, SamplingParams(stop="xy", min_tokens=2))) == "xy"
    assert text_of(run(ids, SamplingParams(stop="xy", min_tokens=3))) == "xy"
    assert text_of(run(ids, SamplingParams(stop="xy", min_tokens=4))) == "xyxyz"


def test_without_detokenization_or_tokenizer_only_ids_pass():
    entry = TokenLogprobs(5, -0.1, 1)
    for tokenizer, sampling in ((BYTES, SamplingParams(detokenize=False)), (None, SamplingParams())):
        assembler = OutputAssembler(tokenizer, sampling)
        delta = assembler.tokens(TokenOut("r", (5,), (entry,)))
        assert (delta.text, delta.token_ids, delta.logprobs) == ("", (5,), (entry,))
        assert assembler.finish(end()).text == ""


def test_leading_space_of_a_sentencepiece_answer_is_dropped_once():
    ids = SPM.encode("the the", add_special_tokens=False)
    assert text_of(run(ids, SamplingParams(stop="nothing"), tokenizer=SPM)) == "the the"
