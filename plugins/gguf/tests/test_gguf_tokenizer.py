"""Tokenizers from GGUF metadata."""

import pytest

from arbi_core.errors import CheckpointError, UnsupportedModelError
from arbi_core.text.tokenizer import Tokenizer
from arbi_plugin_gguf.tokenizer import PRE_TOKENIZERS, build_tokenizer

SAMPLES = [
    "Hello world", "  leading and   inner spaces ", "line\nbreaks\n\n\tand tabs", "naïve café 東京 🙂 — “quotes”",
    "def f(x):\n    return x**2 + 10_000", "numbers 1 12 123 1234 12345.678", "don't you'll WE'RE", "", "<|im_start|>user",
    "a<|im_end|>b", "ﬁ ligature, e\u0301 combining", "x" * 300,
]  # fmt: skip


def byte_level_meta(pre="gpt-2", **extra):
    """All bytes, a few merges, two control tokens."""
    from tokenizers import pre_tokenizers

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "Ġw", "12", "123"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "Ġ w", "1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **extra,
    }


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@pytest.mark.parametrize("text", SAMPLES[:8])
def test_byte_level_text_survives_the_round_trip(pre, text):
    tokenizer = Tokenizer(build_tokenizer(byte_level_meta(pre), "file"))
    assert tokenizer.decode(tokenizer.encode(text)) == (
        text if pre != "qwen2" else __import__("unicodedata").normalize("NFC", text)
    )


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["123"]),
        ("smollm", ["1", "2", "3"]),
        ("llama-bpe", ["123"]),
        ("qwen2", ["1", "2", "3"]),
        ("default", ["123"]),
    ],
)
def test_pre_tokenizers_split_digits_their_own_way(pre, pieces):
    tokenizer = Tokenizer(build_tokenizer(byte_level_meta(pre), "file"))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("123")] == pieces


def test_begin_and_end_tokens_are_added_where_the_file_says_so():
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = Tokenizer(build_tokenizer(byte_level_meta(**flags), "file"))
    assert tokenizer.encode("h")[0] == 0
    assert tokenizer.encode("h")[-1] == 1
    assert tokenizer.encode("h", add_special_tokens=False)[0] != 0
    assert Tokenizer(build_tokenizer(byte_level_meta(), "file")).encode("h")[0] != 0


def test_templates_and_special_tokens_are_kept():
    extra = {
        "tokenizer.chat_template": "A",
        "tokenizer.chat_template.tool_use": "B",
        "tokenizer.ggml.padding_token_id": 1,
    }
    parts = build_tokenizer(byte_level_meta(**extra), "file")
    assert parts.chat_templates == {"default": "A", "tool_use": "B"}
    assert (parts.bos_token, parts.eos_token, parts.special) == ("<s>", "</s>", {"pad_token": "</s>"})


def test_unknown_kinds_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"tokenizer.ggml.pre = 'deepseek-coder' .*smollm, llama-bpe"):
        build_tokenizer(byte_level_meta("deepseek-coder"), "file")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer.ggml.model = 't5'"):
        build_tokenizer({**byte_level_meta(), "tokenizer.ggml.model": "t5"}, "file")
    with pytest.raises(CheckpointError, match="merges do not fit"):
        build_tokenizer({**byte_level_meta(), "tokenizer.ggml.merges": ["zz zz"]}, "file")
    with pytest.raises(CheckpointError, match="without tokens"):
        build_tokenizer({**byte_level_meta(), "tokenizer.ggml.tokens": []}, "file")
    assert build_tokenizer({}, "file") is None


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A small SentencePiece BPE, trained here."""
    import sentencepiece as spm

    folder = tmp_path_factory.mktemp("spm")
    corpus = folder / "corpus.txt"
    corpus.write_text(
        "\n".join(["the quick brown fox jumps over the lazy dog", "hello world and hello again", "numbers 1 2 3"] * 50)
    )
    spm.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "m"), vocab_size=340, model_type="bpe", byte_fallback=True,
        character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return spm.SentencePieceProcessor(model_file=str(folder / "m.model"))


def spm_meta(model, **extra):
    def kind(i):
        return 2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1

    ids = range(model.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **extra,
    }


@pytest.mark.parametrize(
    "text", ["the quick fox", "hello  world", " led by space", "unknown: 東京 🙂", "thethethe", "123"]
)
def test_sentencepiece_ids_equal_the_original(sentencepiece_model, text):
    tokenizer = Tokenizer(build_tokenizer(spm_meta(sentencepiece_model), "file"))
    ids = tokenizer.encode(text)
    assert ids == [1, *sentencepiece_model.encode(text)]
    assert tokenizer.decode(ids) == text


def test_sentencepiece_without_space_prefix(sentencepiece_model):
    meta = spm_meta(
        sentencepiece_model, **{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    )
    tokenizer = Tokenizer(build_tokenizer(meta, "file"))
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
    assert tokenizer.token_text(tokenizer.encode("fox")[0]) == "f" or not tokenizer.token_text(
        tokenizer.encode("fox")[0]
    ).startswith(" ")


def test_scores_must_match_the_tokens(sentencepiece_model):
    with pytest.raises(CheckpointError, match="tokens have 3 scores"):
        build_tokenizer({**spm_meta(sentencepiece_model), "tokenizer.ggml.scores": [0.0] * 3}, "file")
