"""State kinds: what a layer remembers between steps.

The set is open. A plugin adds a kind by offering an attention backend with a new name; the core only ever routes on it.
"""

from __future__ import annotations

from typing import NewType

__all__ = ["NONE", "PAGED_KV", "StateKind"]

StateKind = NewType("StateKind", str)

PAGED_KV = StateKind("paged_kv")
"""Keys and values per token, in pages (MHA, GQA, MQA, sliding windows)."""

NONE = StateKind("none")
"""The layer keeps no state (a plain MLP block)."""
