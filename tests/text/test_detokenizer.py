"""Streamed text equals text decoded at once, for every kind of decoder."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from arbi_core.loader.base import TokenizerParts
from arbi_core.text.detokenizer import IncrementalDetokenizer
from arbi_core.text.tokenizer import Tokenizer
from support.tokenizers import CORPUS, byte_level, sentencepiece_like

MARK = "▁"


def with_decoder(pieces, decoder):
    backend = Backend(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


def gemma_like():
    """Byte fallback without the rule that drops the first space."""
    backend = sentencepiece_like()
    backend.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


WORDS = [MARK, f"{MARK}the", "he", f"a{MARK}b", MARK * 2, "é", "x"]
BACKENDS = {
    "byte-level": byte_level(),
    "llama": sentencepiece_like(),
    "gemma": gemma_like(),
    "metaspace": with_decoder(WORDS, decoders.Metaspace()),
    "metaspace-never": with_decoder(WORDS, decoders.Metaspace(prepend_scheme="never")),
    "wordpiece": with_decoder(["un", "##do", "don", "'", "##t", ".", "é"], decoders.WordPiece()),
    "suffix": with_decoder(["lo", "w</w>", "é</w>", ".</w>"], decoders.BPEDecoder()),
    "none": with_decoder(["lo", "w", "é"], None),
}
TOKENIZERS = {name: Tokenizer(TokenizerParts(backend, "<s>")) for name, backend in BACKENDS.items()}
SIZES = {name: t.vocab_size for name, t in TOKENIZERS.items()}


def streamed(tokenizer, ids, sizes, skip):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*pieces, detokenizer.push(ids[at:]), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_streamed_text_equals_decoding_at_once(name, data):
    """Any ids in any pieces, broken characters included."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, SIZES[name] - 1), max_size=60))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=len(ids)))
    skip = data.draw(st.booleans())
    text = "".join(streamed(tokenizer, ids, sizes, skip))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    reference = BACKENDS[name].decode(ids, skip_special_tokens=skip)
    # Where byte pieces spell no UTF-8, the Rust decoder also gives up the good characters of the same run of bytes.
    if not (tokenizer.rules and tokenizer.rules.byte_pieces and "\ufffd" in reference):
        assert text == reference


@pytest.mark.parametrize("name", ["byte-level", "llama", "gemma"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_whole_characters_never_arrive_in_halves(name, text):
    tokenizer = TOKENIZERS[name]
    text = text.replace("\ufffd", "")
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids, [1] * len(ids), skip=True)
    assert not any("\ufffd" in p for p in pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_replacement_character_that_the_model_writes_is_not_held_back():
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("\ufffd")) == "\ufffd"


def test_unfinished_character_comes_out_at_the_end_only():
    tokenizer = TOKENIZERS["llama"]
    ids = [tokenizer.encode(c, add_special_tokens=False)[-1] for c in "a"] + [3 + 0xF0, 3 + 0x9F]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["a", "", ""]
    assert detokenizer.flush() == "\ufffd\ufffd"
    assert detokenizer.flush() == ""


def test_ids_beyond_the_vocabulary_have_no_text():
    for name, tokenizer in TOKENIZERS.items():
        detokenizer = IncrementalDetokenizer(tokenizer)
        with_padding = detokenizer.push([SIZES[name], 1, SIZES[name] + 7]) + detokenizer.flush()
        assert with_padding == tokenizer.decode([1]), name


def test_only_the_first_space_of_a_text_is_dropped():
    tokenizer = TOKENIZERS["llama"]
    the = tokenizer.encode("the")[-1]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([t]) for t in (the, the)] == ["the", " the"]


@pytest.mark.parametrize("name", ["byte-level", "wordpiece"])
def test_long_generation_keeps_its_text(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(" ".join(CORPUS) * 20) if name == "byte-level" else [0, 1, 2, 3, 4] * 300
    assert "".join(streamed(tokenizer, ids, [1] * len(ids), skip=True)) == tokenizer.decode(ids)
