"""Log-probabilities in OpenAI's two forms."""

from arbi_core.engine.messages import TokenLogprobs
from arbi_core.loader.base import TokenizerParts
from arbi_core.text.logprobs import CompletionLogprobs, chat_logprobs
from arbi_core.text.tokenizer import Tokenizer
from support.tokenizers import byte_level

BYTES = Tokenizer(TokenizerParts(byte_level(), "<s>", "</s>"))


def entries(text):
    return [TokenLogprobs(t, -0.5, 1, ((t, -0.5), (0, -3.0))) for t in BYTES.encode(text)]


def test_chat_form_has_exact_bytes():
    content = chat_logprobs(BYTES, entries("é🐇"))
    assert bytes(b for token in content for b in token["bytes"]).decode() == "é🐇"
    assert content[0]["top_logprobs"][1] == {"token": "<pad>", "logprob": -3.0, "bytes": list(b"<pad>")}


def test_offsets_count_characters_of_the_text_over_several_blocks():
    text = "ab 🐇 cd"
    all_entries = entries(text)
    form = CompletionLogprobs(BYTES, offset=10)
    blocks = [form.block(all_entries[:4]), form.block(all_entries[4:])]
    offsets = [o - 10 for b in blocks for o in b["text_offset"]]
    tokens = [t for b in blocks for t in b["tokens"]]
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        expected = "🐇" if token.startswith("bytes:") else token.strip()
        assert text[offset:].strip().startswith(expected)
    assert any(t.startswith("bytes:\\xf0") for t in tokens)


def test_skipped_tokens_take_no_room():
    scores = [TokenLogprobs(BYTES.eos_token_id, -1.0, 1), *entries("a")]
    assert CompletionLogprobs(BYTES).block(scores)["text_offset"] == [0, 0]
    assert CompletionLogprobs(BYTES, skip_special_tokens=False).block(scores)["text_offset"] == [0, 4]


def test_chosen_token_stands_in_for_missing_alternatives():
    token = BYTES.encode("a")[0]
    block = CompletionLogprobs(BYTES).block([TokenLogprobs(token, -1.0, 1)])
    assert block["top_logprobs"] == [{"a": -1.0}]
    assert block["token_logprobs"] == [-1.0]


def test_without_tokenizer_tokens_are_named_by_id():
    block = CompletionLogprobs(None).block([TokenLogprobs(7, -1.0, 1)])
    assert (block["tokens"], block["text_offset"]) == (["token_id:7"], [0])
