"""Declarative weight maps: which checkpoint tensor fills which parameter, and how it is cut over ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import field, frozen

__all__ = ["WeightMap", "WeightShardSpec"]


@frozen
class WeightShardSpec:
    """One checkpoint tensor and its place in the model.

    Attributes:
        param: dotted parameter name in the module tree, e.g. ``layers.0.attn.qkv.weight``.
        source: tensor name in the checkpoint (Hugging Face naming; readers of other formats translate to it).
        shard_dim: dimension cut over tensor-parallel ranks; None replicates.
        shard_id: which piece of a merged parameter this is (``"q"``, ``"gate"``, ...); None fills it whole.
        aliases: other names under which checkpoints are known to carry the tensor.
        optional: the parameter keeps its initial value when the checkpoint lacks the tensor.
    """

    param: str
    source: str
    shard_dim: int | None = None
    shard_id: str | None = None
    aliases: tuple[str, ...] = ()
    optional: bool = False


@frozen
class WeightMap:
    """All entries of a model.

    Attributes:
        entries: one per checkpoint tensor.
        ignored: regular expressions (full match) of checkpoint tensors that carry nothing to load,
            e.g. ``.*rotary_emb\\.inv_freq`` or a tied ``lm_head.weight``.
    """

    entries: tuple[WeightShardSpec, ...]
    ignored: tuple[str, ...] = field(default=())

    def __iter__(self) -> Iterator[WeightShardSpec]:
        return iter(self.entries)

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint tensor is known and deliberately not loaded."""
        return any(re.fullmatch(p, name) for p in self.ignored)
