"""Tokenizer files of a Hugging Face directory, compared with what transformers makes of the same files."""

import json
import os

import pytest

from arbi_core.errors import CheckpointError
from arbi_core.loader.hf_tokenizer import read_tokenizer
from support.tokenizers import byte_level, write_tokenizer_files

TEXT = "<s>The quick<|end|> fox<|call|>\n<|x|> jumps</s>"


@pytest.fixture
def folder(tmp_path):
    write_tokenizer_files(tmp_path)
    configure(tmp_path, eos_token=added("</s>"))
    return tmp_path


def configure(folder, **changes):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def added(content, **flags):
    return {"content": content, "special": True, "lstrip": False, "rstrip": False, "normalized": False,
            "single_word": False, "__type": "AddedToken", **flags}  # fmt: skip


def reference(folder):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def assert_as_transformers(folder, text=TEXT):
    ours, theirs = read_tokenizer(folder).backend, reference(folder)
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    return ids


def test_directory_without_a_tokenizer_has_none(tmp_path):
    assert read_tokenizer(tmp_path) is None


def test_plain_tokenizer_is_that_of_transformers(folder):
    assert_as_transformers(folder)


def test_tokens_that_only_the_config_declares_are_added(folder):
    size = byte_level().get_vocab_size()
    configure(folder, added_tokens_decoder={
        str(size + 1): added("<|x|>", special=False, lstrip=True), str(size): added("<|call|>")
    })  # fmt: skip
    ids = assert_as_transformers(folder)
    assert {size, size + 1} <= set(ids)


def test_flags_of_the_config_beat_those_of_the_tokenizer(folder):
    end = byte_level().token_to_id("<|end|>")
    configure(folder, added_tokens_decoder={str(end): added("<|end|>", special=False, rstrip=True)})
    assert_as_transformers(folder)


def test_named_word_of_the_vocabulary_becomes_special(folder):
    vocab = byte_level().get_vocab()
    words = [piece for piece in vocab if len(piece) > 1 and piece.isascii() and piece.isalpha()][:3]
    configure(folder, eos_token=words[0], additional_special_tokens=[words[1], added(words[2], lstrip=True)])
    text = "  ".join(words)
    parts = read_tokenizer(folder)
    assert parts.eos_token == words[0]
    special = {t.content: t for t in parts.backend.get_added_tokens_decoder().values() if t.special}
    assert set(words) <= set(special)
    assert special[words[2]].lstrip
    assert_as_transformers(folder, text)


def test_token_declared_with_another_id_is_refused_with_both_ids(folder):
    configure(folder, added_tokens_decoder={"5": added("<|end|>")})
    with pytest.raises(CheckpointError, match=r"'<\|end\|>' with id 5, and tokenizer.json gives it id 3"):
        read_tokenizer(folder)
    configure(folder, added_tokens_decoder={"9000": added("<|far|>")})
    with pytest.raises(CheckpointError, match=r"'<\|far\|>' with id 9000"):
        read_tokenizer(folder)


@pytest.mark.parametrize("declared", [[1], {"x": added("a")}, {"5": "a"}, {"5": {"special": True}}])
def test_malformed_declarations_are_refused(folder, declared):
    configure(folder, added_tokens_decoder=declared)
    with pytest.raises(CheckpointError, match="added_tokens_decoder is malformed"):
        read_tokenizer(folder)


def test_special_tokens_are_strings_or_objects_in_either_file(folder):
    configure(folder, bos_token=None, eos_token=added("</s>"), unk_token="")
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": added("<s>"), "eos_token": "<pad>", "pad_token": "<pad>"})
    )
    parts = read_tokenizer(folder)
    assert (parts.bos_token, parts.eos_token) == ("<s>", "</s>")
    assert parts.special == {"pad_token": "<pad>"}


def test_name_without_an_id_adds_no_token(folder):
    configure(folder, pad_token="[PAD]")
    parts = read_tokenizer(folder)
    assert parts.special == {"pad_token": "[PAD]"}
    assert parts.backend.token_to_id("[PAD]") is None


def test_damaged_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be read"):
        read_tokenizer(folder)


# -- chat templates ---------------------------------------------------------------------------------------------------


def test_sources_of_the_default_template_in_order(folder):
    configure(folder, chat_template="config")
    assert read_tokenizer(folder).chat_templates == {"default": "config"}
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert read_tokenizer(folder).chat_templates == {"default": "json"}
    (folder / "chat_template.jinja").write_text("jinja é")
    assert read_tokenizer(folder).chat_templates == {"default": "jinja é"}


def test_named_templates_come_from_the_config_and_from_files(folder):
    listed = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    configure(folder, chat_template=listed)
    assert read_tokenizer(folder).chat_templates == {"default": "d", "rag": "r"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    assert read_tokenizer(folder).chat_templates == {"default": "d", "rag": "r", "tool_use": "t"}


@pytest.mark.parametrize("template", [3, ["x"], [{"name": "default"}]])
def test_malformed_template_is_refused(folder, template):
    configure(folder, chat_template=template)
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: chat_template must be a string or a list"):
        read_tokenizer(folder)


def test_template_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="chat_template.jinja is not UTF-8 text"):
        read_tokenizer(folder)
