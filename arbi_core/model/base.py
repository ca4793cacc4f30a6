"""What a model family implements, and what a built model offers to the runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:
    import torch

    from arbi_core.distributed.group import ProcessGroup
    from arbi_core.runner.batch import ForwardBatch
    from arbi_core.spec import ModelSpec, WeightMap

__all__ = ["BuildContext", "LayerCall", "Model", "ModelFamily"]


class LayerCall(Protocol):
    """A layer's attention, bound to its backend, its state and the metadata of the running step."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        """Write k and v, attend: ``(N, H, D), (N, Hkv, D), (N, Hkv, Dv) -> (N, H, Dv)``. See `AttnOp.forward`."""
        ...


@frozen
class BuildContext:
    """What a family needs to build its modules. Modules are built on the meta device; the loader materialises them.

    Attributes:
        dtype: dtype of activations and of dense weights.
        group: the tensor-parallel process group; its `spec` says which slice this rank holds.
        max_model_len: longest context in tokens; rotary tables have this many rows.
    """

    dtype: torch.dtype
    group: ProcessGroup
    max_model_len: int


class Model(Protocol):
    """A built model. In practice also a `torch.nn.Module` whose parameter names match its family's weight map."""

    def forward(self, batch: ForwardBatch, layers: Sequence[LayerCall]) -> torch.Tensor:
        """Run all layers over ``batch.num_tokens`` tokens: returns ``(N, hidden)`` after the final norm."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project chosen rows: ``(R, hidden) -> (R, vocab)`` float32."""
        ...

    def attention_sinks(self, layer: int) -> torch.Tensor | None:
        """Learned extra softmax logits of a layer, ``(H,)`` on this rank, or None."""
        ...


@runtime_checkable
class ModelFamily(Protocol):
    """A group of architectures that share code, offered by the hook ``arbi_model_families``."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Values of HF ``architectures[0]`` that this family serves."""
        ...

    def parse_config(self, hf: Mapping[str, Any]) -> ModelSpec:
        """Read an HF config. Raises `UnsupportedModelError` naming every knob it does not know or cannot serve."""
        ...

    def build(self, spec: ModelSpec, ctx: BuildContext) -> torch.nn.Module:
        """Make the modules (a `Model`)."""
        ...

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        """Say where every parameter of `build`'s result comes from."""
        ...
