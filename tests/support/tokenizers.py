"""Small tokenizers, trained on the spot."""

import json

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "naïve café — ☕ 東京 🙂 déjà vu",
    "def f(x):\n    return x + 1\n\n",
    "aaa bbb ccc   ddd\t\teee",
] * 4
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def byte_level(vocab_size: int = 320):
    """A byte-level BPE with all 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like():
    """A BPE with the leading-space mark and byte fallback, as Llama 2 has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,TH", "th", "the", "▁the", "he", "qu", "▁a"]
    vocab = {p: i for i, p in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("h", "e"), ("q", "u"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_tokenizer_files(path) -> None:
    """tokenizer.json and tokenizer_config.json of the byte-level tokenizer."""
    byte_level().save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
