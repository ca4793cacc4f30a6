"""What a model path may be, and that nothing is fetched for what is there."""

import json
import sys
from types import SimpleNamespace

import pytest

from arbi_core.builtin.safetensors_format import SafetensorsFormat
from arbi_core.config.tree import ModelConfig
from arbi_core.errors import CheckpointError
from arbi_core.loader.resolve import display_name, prepare, resolve_checkpoint
from arbi_core.plugins import load_registry
from support.tokenizers import write_tokenizer_files


@pytest.fixture
def registry():
    return SimpleNamespace(checkpoint_formats={"safetensors": SafetensorsFormat()})


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub client that records what it is asked for and has one repository."""
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"from": "hub"}')
    asked = []

    def snapshot_download(repo, **options):
        asked.append((repo, options))
        if repo != "org/model":
            raise OSError(f"404 for {repo}")
        return str(snapshot)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    return SimpleNamespace(asked=asked, snapshot=snapshot)


def refusal(path, registry, **options):
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(str(path), registry, **options)
    return str(caught.value)


def test_hub_id_is_fetched_without_second_copies_of_the_weights(hub, registry):
    assert resolve_checkpoint("org/model", registry).config() == {"from": "hub"}
    ((repo, options),) = hub.asked
    assert repo == "org/model"
    assert "*.safetensors" in options["allow_patterns"]
    assert "*.bin" not in options["allow_patterns"]
    assert "consolidated*" in options["ignore_patterns"]


def test_only_text_files_are_fetched_where_no_weights_are_read(hub, registry):
    resolve_checkpoint("org/model", registry, dummy=True)
    assert hub.asked[0][1]["allow_patterns"] == ["*.json", "*.jinja"]


def test_unknown_hub_id_says_what_the_hub_said(hub, registry):
    said = refusal("org/other", registry)
    assert "org/other does not exist here and could not be downloaded: 404 for org/other" in said


def test_directory_that_looks_like_a_hub_id_is_never_fetched(hub, registry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "org" / "model" / "config.json").write_text('{"from": "here"}')
    assert resolve_checkpoint("org/model", registry).config() == {"from": "here"}
    assert display_name("org/model") == "model"
    assert hub.asked == []


@pytest.mark.parametrize(
    "path",
    ["./models/x", "../x", "a/b/c", "/nowhere/x", "~/nowhere", "models/x.gguf", "x", "./missing/", "a\0b", "a" * 5000],
)
def test_what_is_no_hub_id_is_a_path_that_does_not_exist(hub, registry, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refusal(path, registry)
    assert "does not exist" in said
    assert hub.asked == []


def test_home_directory_is_expanded(registry, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert resolve_checkpoint("~/m", registry).path == tmp_path / "m"
    assert display_name("~/m") == "m"


def test_unreadable_paths_say_what_to_name_instead(registry, tmp_path):
    (tmp_path / "model.Q4_0.gguf").write_bytes(b"GGUF")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    assert f"name the GGUF file itself, for example {tmp_path / 'model.Q4_0.gguf'}" in refusal(tmp_path, registry)
    assert f"name its directory, {tmp_path}" in refusal(tmp_path / "model.safetensors", registry)
    assert "an unknown file format (installed formats: safetensors)" in refusal(tmp_path / "notes.txt", registry)
    assert "pip install arbi-plugin-gguf" in refusal(tmp_path / "model.Q4_0.gguf", registry)


def test_formats_are_asked_before_anything_is_refused(tmp_path):
    file = tmp_path / "model.odd"
    file.write_bytes(b"")
    opened = object()
    odd = SimpleNamespace(detect=lambda path: path.suffix == ".odd", open=lambda path: opened)
    registry = SimpleNamespace(checkpoint_formats={"safetensors": SafetensorsFormat(), "odd": odd})
    assert resolve_checkpoint(str(file), registry) is opened


def test_tokenizer_may_be_a_directory_or_its_file(registry, tmp_path):
    write_tokenizer_files(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        source = resolve_checkpoint(str(path), registry, dummy=True)
        assert source.tokenizer().bos_token == "<s>"
        assert source.generation_config() == {}
        with pytest.raises(CheckpointError, match="holds no weights"):
            source.tensors()
        with pytest.raises(CheckpointError, match="config.json is missing"):
            source.config()
        source.close()


def test_sentencepiece_model_alone_is_said_to_be_unread(tiny_dir, tmp_path):
    (tmp_path / "config.json").write_text((tiny_dir("llama") / "config.json").read_text())
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"only tokenizer.model, which is not read"):
        prepare(ModelConfig(path=str(tmp_path)), load_registry())


def test_prepare_brings_everything_that_the_files_say(tiny_text_dir):
    loaded = prepare(ModelConfig(path=str(tiny_text_dir)), load_registry())
    assert "LlamaForCausalLM" in loaded.family.architectures
    assert loaded.spec.dims.vocab_size == json.loads((tiny_text_dir / "config.json").read_text())["vocab_size"]
    assert loaded.generation_config == {"eos_token_id": [2, 3]}
    assert loaded.tokenizer.eos_token == "</s>"
    assert "model.norm.weight" in loaded.checkpoint.tensors()


def test_prepare_without_text_reads_no_tokenizer(tiny_text_dir):
    assert prepare(ModelConfig(path=str(tiny_text_dir), skip_tokenizer_init=True), load_registry()).tokenizer is None


def test_snapshot_in_the_hub_cache_has_its_id(hub):
    assert display_name(str(hub.snapshot)) == "org/model"
    assert display_name("/") == "/"
