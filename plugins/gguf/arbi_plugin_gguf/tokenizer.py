"""Builds the tokenizer that a GGUF file describes. Torch-free.

Two kinds exist: byte-level BPE (``gpt2``), whose pre-tokenizer is named by ``tokenizer.ggml.pre``, and SentencePiece
BPE (``llama``), which merges whatever adjacent pieces form the piece of the best score and falls back to bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from arbi_core.api import CheckpointError, TokenizerParts, UnsupportedModelError

__all__ = ["build_tokenizer"]

CONTROL, USER_DEFINED = 3, 4
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + WORDS + r"|\p{N}{1,3}" + REST
QWEN2 = CONTRACTIONS + WORDS + r"|\p{N}" + REST
DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
PRE_TOKENIZERS = ("smollm", "llama-bpe", "qwen2", "gpt-2", "default")


def build_tokenizer(meta: Mapping[str, Any], where: str) -> TokenizerParts | None:
    """Make the parts from a file's metadata; None where it has no tokenizer.

    Raises:
        UnsupportedModelError: a kind or a pre-tokenizer that is not known.
        CheckpointError: lists that do not fit together.
    """
    kind = meta.get("tokenizer.ggml.model")
    if kind is None:
        return None
    tokens: list[str] = meta.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise CheckpointError(f"{where} has a tokenizer without tokens")
    if kind == "gpt2":
        backend = _byte_level(meta, tokens, where)
    elif kind == "llama":
        backend = _sentencepiece(meta, tokens, where)
    else:
        raise UnsupportedModelError(
            f"{where}: tokenizer.ggml.model = {kind!r} is not supported (supported: gpt2, llama)"
        )
    _add_special(backend, tokens, meta.get("tokenizer.ggml.token_type") or [])
    _add_template(backend, meta, tokens, add_bos=kind == "llama")
    templates = {
        "default" if k == "tokenizer.chat_template" else k.removeprefix("tokenizer.chat_template."): v
        for k, v in meta.items()
        if k.startswith("tokenizer.chat_template") and isinstance(v, str)
    }
    return TokenizerParts(
        backend=backend,
        bos_token=_token(meta, tokens, "bos"),
        eos_token=_token(meta, tokens, "eos"),
        chat_templates=templates,
        special={
            f"{long}_token": token
            for short, long in (("unknown", "unk"), ("padding", "pad"))
            if (token := _token(meta, tokens, short)) is not None
        },
    )


def _token(meta: Mapping[str, Any], tokens: Sequence[str], name: str) -> str | None:
    index = meta.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _byte_level(meta: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    pre = meta.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{where}: tokenizer.ggml.pre = {pre!r} is not supported (supported: {', '.join(PRE_TOKENIZERS)})"
        )
    merges = [tuple(m.split(" ", 1)) for m in meta.get("tokenizer.ggml.merges") or []]
    vocab = {t: i for i, t in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as exc:  # the Rust side raises bare Exception
        raise CheckpointError(f"{where}: the merges do not fit the tokens: {exc}") from exc
    backend = Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre, bool(meta.get("tokenizer.ggml.add_space_prefix", False)))
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(name: str, add_space: bool) -> Any:  # noqa: FBT001
    whole = pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=True)
    if name == "gpt-2":
        return whole
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    patterns = {"llama-bpe": (LLAMA3,), "qwen2": (QWEN2,), "default": DEFAULT}[name]
    splits: list[Any] = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=False)])


def _sentencepiece(meta: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    scores = meta.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise CheckpointError(f"{where}: {len(tokens)} tokens have {len(scores)} scores")
    vocab = {t: i for i, t in enumerate(tokens)}
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    unknown = _token(meta, tokens, "unknown") or "<unk>"
    byte_fallback = "<0x00>" in vocab
    model = models.BPE(
        vocab=vocab,
        merges=_merges(tokens, scores, types, vocab),
        unk_token=unknown if unknown in vocab else None,
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    backend = Tokenizer(model)
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to make a normal piece of two others, best score first (as SentencePiece would merge)."""
    ranked = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind != 1 or len(token) < 2:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, vocab[left], vocab[right], left, right))
    ranked.sort(key=lambda r: r[:3])
    return [(left, right) for *_, left, right in ranked]


def _add_special(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    control = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=False) if k == CONTROL
    ]
    user = [
        AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, types, strict=False) if k == USER_DEFINED
    ]
    backend.add_special_tokens(control)
    backend.add_tokens(user)


def _add_template(backend: Tokenizer, meta: Mapping[str, Any], tokens: Sequence[str], *, add_bos: bool) -> None:
    """Begin and end tokens around an encoded text, where the file asks for them."""
    bos, eos = _token(meta, tokens, "bos"), _token(meta, tokens, "eos")
    first = bos if meta.get("tokenizer.ggml.add_bos_token", add_bos) else None
    last = eos if meta.get("tokenizer.ggml.add_eos_token", False) else None
    if first is None and last is None:
        return
    pattern = [t for t in (first, "$A", last) if t is not None]
    special = [(t, backend.token_to_id(t)) for t in (first, last) if t is not None]
    backend.post_processor = processors.TemplateProcessing(single=" ".join(pattern), special_tokens=special)
