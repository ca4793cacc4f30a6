"""What a model is made of, as data: one `LayerSpec` per layer and a few global dimensions."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from arbi_core.spec.state import PAGED_KV, StateKind

__all__ = ["LayerSpec", "ModelDims", "ModelSpec"]


@frozen
class LayerSpec:
    """What the engine and the backends need to know of one layer.

    Attributes:
        index: position in the model, from 0.
        state_kind: routing key to an attention backend.
        num_heads: query heads (all ranks together).
        num_kv_heads: key/value heads (all ranks together); divides `num_heads`.
        head_dim: width of one key head.
        v_head_dim: width of one value head; None means `head_dim`.
        window: sliding window in tokens, the token itself included; None attends to everything before it.
        sinks: the layer has one learned extra logit per head in its softmax denominator.
        scale: softmax scale; None means ``head_dim ** -0.5``.
        soft_cap: logits become ``cap * tanh(logits / cap)`` before the softmax; None means no cap.
        kv_source_layer: index of the layer whose keys and values this one reads instead of writing its own.
        extra: attrs object of a plugin's own kind.
    """

    index: int
    state_kind: StateKind = PAGED_KV
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int | None = None
    window: int | None = None
    sinks: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    kv_source_layer: int | None = None
    extra: Any = None

    @property
    def softmax_scale(self) -> float:
        """The scale that multiplies ``q @ k``."""
        return self.scale if self.scale is not None else float(self.head_dim) ** -0.5

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


@frozen
class ModelDims:
    """Global dimensions.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        vocab_size: rows of the embedding; logits have this width.
        max_position_embeddings: longest context the positions are defined for, in tokens.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int


@frozen
class ModelSpec:
    """A parsed checkpoint config.

    Attributes:
        architecture: HF ``architectures[0]``.
        dims: global dimensions.
        layers: one entry per layer, in order.
        dtype: dtype the checkpoint was trained in: ``bfloat16``, ``float16`` or ``float32``.
        eos_token_ids: ids that end a generation unless the request ignores them.
        bos_token_id: id that starts a sequence, if the config names one.
        config: the family's own parsed config (an attrs object).
    """

    architecture: str
    dims: ModelDims
    layers: tuple[LayerSpec, ...]
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    config: Any = field(default=None)
