"""Encoding, decoding, and what is known of a single token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from arbi_core.errors import RequestError
from arbi_core.loader.base import TokenizerParts
from arbi_core.text.tokenizer import Tokenizer
from support.tokenizers import TEMPLATE, byte_level, sentencepiece_like

BYTES = Tokenizer(TokenizerParts(byte_level(), "<s>", "</s>", {"default": TEMPLATE, "rag": "x"}))
SPM = Tokenizer(TokenizerParts(sentencepiece_like(), "<s>", "</s>", special={"pad_token": "<unk>"}))


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_byte_level_text_survives_encoding_and_decoding(text):
    assert BYTES.decode(BYTES.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_token_bytes_join_to_the_text(text):
    assert b"".join(BYTES.token_bytes(i) for i in BYTES.encode(text)) == text.encode()
    whole = b"".join(SPM.token_bytes(i) for i in SPM.encode(text))
    assert whole.decode().removeprefix(" ") == SPM.decode(SPM.encode(text))


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.text(max_size=20), max_size=4))
def test_a_batch_encodes_like_its_texts(texts):
    assert SPM.encode_batch(texts) == [SPM.encode(t) for t in texts]


def test_special_tokens_are_added_on_request():
    from tokenizers.processors import TemplateProcessing

    backend = byte_level()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    tokenizer = Tokenizer(TokenizerParts(backend, "<s>", "</s>"))
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[1:]


def test_truncation_and_padding_of_the_file_are_switched_off():
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer(TokenizerParts(backend))
    assert tokenizer.decode(tokenizer.encode("a longer text than that")) == "a longer text than that"
    assert len(tokenizer.encode("a")) == 1


def test_lone_surrogate_and_non_text_are_refused():
    with pytest.raises(RequestError, match="lone surrogate"):
        BYTES.encode("a\ud800b")
    with pytest.raises(RequestError, match="only text can be encoded, not 5"):
        BYTES.encode_batch(["a", 5])


def test_character_that_the_vocabulary_cannot_write_is_refused():
    backend = Backend(models.Unigram([("a", -1.0)], unk_id=None, byte_fallback=False))
    with pytest.raises(RequestError, match="cannot encode the text"):
        Tokenizer(TokenizerParts(backend)).encode("b")


@pytest.mark.parametrize("bad", [-1, BYTES.vocab_size, 2**40])
def test_token_ids_out_of_range_are_refused_by_decoding_and_have_no_bytes(bad):
    with pytest.raises(RequestError, match=f"token id {bad} is not in the vocabulary"):
        BYTES.decode([0, bad])
    assert BYTES.token_bytes(bad) == b""
    assert BYTES.token_text(bad) == ""


def test_text_of_single_tokens():
    assert SPM.token_bytes(SPM.encode("\n", add_special_tokens=False)[-1]) == b"\n"
    assert SPM.token_text(SPM.encode("the")[-1]) == " the"
    assert BYTES.token_text(BYTES.eos_token_id) == "</s>"
    half = BYTES.encode("☀")[0]
    assert BYTES.token_text(half) == "\ufffd"
    assert BYTES.token_bytes(half) == "☀".encode()[: len(BYTES.token_bytes(half))]


def test_added_tokens_have_the_bytes_that_decoding_gives_them():
    backend = byte_level()
    backend.add_tokens([AddedToken(t) for t in ("a b", "東京", "ñ")])
    tokenizer = Tokenizer(TokenizerParts(backend))
    for token in range(tokenizer.vocab_size):
        known = tokenizer.token_bytes(token).decode("utf-8", "replace")
        assert known == backend.decode([token], skip_special_tokens=False)


def test_suffix_vocabulary_has_readable_tokens():
    backend = Backend(models.BPE({"lo": 0, "w</w>": 1}, []))
    backend.decoder = decoders.BPEDecoder()
    assert Tokenizer(TokenizerParts(backend)).token_text(1) == "w"


def test_names_sizes_and_templates():
    assert BYTES.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert SPM.named_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    assert {BYTES.bos_token_id, BYTES.eos_token_id} < BYTES.special_ids
    assert BYTES.piece(BYTES.vocab_size - 1) is not None
    assert BYTES.has_chat_template
    assert BYTES.chat_template_names == ("default", "rag")
    assert not SPM.has_chat_template
    assert Tokenizer(TokenizerParts(byte_level(), eos_token="<nowhere>")).eos_token_id is None


def test_added_tokens_count_in_the_vocabulary():
    backend = byte_level()
    size = Tokenizer(TokenizerParts(byte_level())).vocab_size
    backend.add_tokens([AddedToken("<new>")])
    assert Tokenizer(TokenizerParts(backend)).vocab_size == size + 1
