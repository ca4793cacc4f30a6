"""What a checkpoint format and a weight format implement, and what the loader hands to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:
    import tokenizers
    import torch

    from arbi_core.model.linear import LinearBase
    from arbi_core.spec import ParallelSpec, WeightShardSpec

__all__ = [
    "Checkpoint",
    "CheckpointFormat",
    "LinearMethod",
    "TensorSource",
    "TokenizerParts",
    "WeightContext",
    "WeightFormat",
    "WeightPiece",
]


class TensorSource(Protocol):
    """One tensor of a checkpoint, not yet read.

    Attributes:
        name: name in Hugging Face terms.
        shape: full shape.
        dtype: torch dtype name of what `load` returns.
        encoding: ``"dense"``, or the packed encoding of a quantised tensor, e.g. ``"gguf:q4_1"``.

    A packed source may also have ``nbytes``, its size in the file; progress counts it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str

    def load(self, dim: int | None = None, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Read the tensor, or ``length`` entries from ``start`` along ``dim``; a quantised one is dequantised.

        The result may be a view of the mapped file: copy what a parameter keeps. Several threads may read at once.
        """
        ...


@frozen
class TokenizerParts:
    """What a checkpoint says about text.

    Attributes:
        backend: the Rust tokenizer, with its normalizer, pre-tokenizer, decoder and post-processor set.
        bos_token: text of the begin token, if any.
        eos_token: text of the end token, if any.
        chat_templates: Jinja sources by name; the usual one is ``"default"``.
        special: other named special tokens that templates may refer to (``pad_token``, ``unk_token``, ...).
    """

    backend: tokenizers.Tokenizer
    bos_token: str | None = None
    eos_token: str | None = None
    chat_templates: Mapping[str, str] = {}
    special: Mapping[str, str] = {}


class Checkpoint(Protocol):
    """An opened checkpoint. Reading is lazy and memory-mapped."""

    path: Path

    def config(self) -> Mapping[str, Any]:
        """The model's config in the form of a Hugging Face ``config.json``."""
        ...

    def generation_config(self) -> Mapping[str, Any]:
        """Default sampling parameters and end tokens in the form of ``generation_config.json``; may be empty."""
        ...

    def tensors(self) -> Mapping[str, TensorSource]:
        """All tensors by name. Raises `CheckpointError` for a missing shard or a truncated file."""
        ...

    def tokenizer(self) -> TokenizerParts | None:
        """The tokenizer, or None if the checkpoint has none."""
        ...

    def close(self) -> None:
        """Drop file mappings. Tensors already loaded stay valid."""
        ...


@runtime_checkable
class CheckpointFormat(Protocol):
    """A kind of checkpoint on disk, offered by the hook ``arbi_checkpoint_formats``."""

    @property
    def name(self) -> str:
        """Short name, e.g. ``safetensors``."""
        ...

    def detect(self, path: Path) -> bool:
        """Whether `path` (a file or a directory that exists) is of this format. Cheap; never raises."""
        ...

    def open(self, path: Path) -> Checkpoint:
        """Open it. Raises `CheckpointError` naming the file and what is wrong with it."""
        ...


@frozen
class WeightPiece:
    """One checkpoint tensor together with its entry in the weight map."""

    spec: WeightShardSpec
    source: TensorSource


class LinearMethod(Protocol):
    """How one linear layer holds and multiplies its weight. The dense one lives in `arbi_core.model.linear`."""

    def load(self, layer: LinearBase, pieces: Sequence[WeightPiece], device: torch.device, dtype: torch.dtype) -> None:
        """Fill the layer from all pieces of its weight (this rank's slice of each).

        A method that keeps no dense ``weight`` leaves that parameter alone; the layer drops it.
        """
        ...

    def apply(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T`` without bias: ``(..., in) -> (..., out)``."""
        ...


@frozen
class WeightContext:
    """Where weights are loaded to.

    Attributes:
        device: device of the model.
        dtype: dtype of activations.
        parallel: this rank's slice.
        options: resolved plugin configuration sections by name.
    """

    device: torch.device
    dtype: torch.dtype
    parallel: ParallelSpec
    options: Mapping[str, Any] = {}


@runtime_checkable
class WeightFormat(Protocol):
    """A quantised form of linear weights, offered by the hook ``arbi_weight_formats``.

    Formats are asked in ascending `detection_priority`; the first `linear_method` that is not None serves the layer.
    """

    @property
    def name(self) -> str:
        """Short name, e.g. ``gguf-int4``."""
        ...

    @property
    def detection_priority(self) -> int:
        """Lower is asked first."""
        ...

    def linear_method(
        self, layer: LinearBase, pieces: Sequence[WeightPiece], ctx: WeightContext
    ) -> LinearMethod | None:
        """Return the method that keeps these pieces packed, or None if this format does not apply to them."""
        ...
