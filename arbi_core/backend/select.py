"""Which backend serves which kind of layer. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from arbi_core.errors import BackendError, ConfigError, UnknownNameError
from arbi_core.spec import NONE, PAGED_KV, LayerSpec, StateKind

if TYPE_CHECKING:
    import torch

    from arbi_core.backend.base import AttentionBackend

__all__ = ["select_backends"]

KV_DTYPES = {
    "auto": "reference",
    "bf16": "reference-bf16",
    "fp16": "reference-fp16",
    "fp32": "reference-fp32",
}
"""Names of ``cache.kv_dtype`` that the core itself serves; any other is the name of an installed paged backend."""


def select_backends(
    layers: Iterable[LayerSpec],
    offered: Mapping[str, AttentionBackend],
    kv_dtype: str,
    chosen: Iterable[str],
    device: torch.device,
) -> dict[StateKind, AttentionBackend]:
    """Pick one backend per state kind of the model.

    Args:
        layers: the model's layers.
        offered: installed backends by ``kind:name``.
        kv_dtype: ``cache.kv_dtype``.
        chosen: ``cache.backends``, each ``kind:name``; wins over `kv_dtype`.
        device: where the model runs.

    Raises:
        ConfigError: a choice is not ``kind:name`` or names a kind twice.
        UnknownNameError: a name that nobody offers.
        BackendError: the chosen backend cannot serve a layer, or no backend serves a kind.
    """
    picks = _explicit(chosen, offered)
    result: dict[StateKind, AttentionBackend] = {}
    for layer in layers:
        kind = layer.state_kind
        if kind == NONE:
            continue
        if kind not in result:
            result[kind] = _pick(kind, picks, offered, kv_dtype, layer, device)
        reason = result[kind].supports(layer, device)
        if reason is not None:
            raise BackendError(f"{kind}:{result[kind].name} cannot serve layer {layer.index}: {reason}")
    return result


def _explicit(chosen: Iterable[str], offered: Mapping[str, AttentionBackend]) -> dict[str, AttentionBackend]:
    picks: dict[str, AttentionBackend] = {}
    for key in chosen:
        kind, colon, name = key.partition(":")
        if not colon or not kind or not name:
            raise ConfigError(
                "cache.backends", f"{key!r} is not of the form kind:name", "for example paged_kv:reference"
            )
        if kind in picks:
            raise ConfigError("cache.backends", f"two backends are chosen for {kind}", "choose one")
        if key not in offered:
            raise UnknownNameError(_unknown(key, offered))
        picks[kind] = offered[key]
    return picks


def _pick(
    kind: StateKind,
    picks: Mapping[str, AttentionBackend],
    offered: Mapping[str, AttentionBackend],
    kv_dtype: str,
    layer: LayerSpec,
    device: torch.device,
) -> AttentionBackend:
    if kind in picks:
        return picks[kind]
    if kind == PAGED_KV:
        key = f"{kind}:{KV_DTYPES.get(kv_dtype, kv_dtype)}"
        if key not in offered:
            raise UnknownNameError(_unknown(key, offered, f"cache.kv_dtype = {kv_dtype!r}: "))
        return offered[key]
    reasons = []
    for key, backend in offered.items():
        if backend.state_kind == kind:
            reason = backend.supports(layer, device)
            if reason is None:
                return backend
            reasons.append(f"{key}: {reason}")
    tried = "; ".join(reasons) or "no installed plugin offers one"
    raise BackendError(f"layer {layer.index} needs a backend of kind {kind!r}: {tried}")


def _unknown(key: str, offered: Mapping[str, AttentionBackend], prefix: str = "") -> str:
    name = key.partition(":")[2]
    hint = "; pip install arbi-plugin-tkv brings the tkv names" if name.startswith(("tkv", "fp8")) else ""
    installed = ", ".join(sorted(offered))
    return f"{prefix}no installed plugin offers the attention backend {key!r} (installed: {installed}{hint})"
