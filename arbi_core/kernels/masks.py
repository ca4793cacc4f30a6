"""Masks of causal and windowed attention, made once a step."""

from __future__ import annotations

import torch

__all__ = ["QUERY_BLOCK", "StepMasks"]

QUERY_BLOCK = 512
"""Query tokens attended at once: bounds the height of masks."""


class StepMasks:
    """The masks of a step.

    Whether a query sees a key depends on their distance alone, so every mask of the step, in all rows and layers of one
    window, is a part of one matrix.

    Args:
        queries: most tokens of one row in this step.
        context: longest context of this step.

    Attributes:
        block: most queries of a mask; longer chunks are attended block by block.
    """

    block = QUERY_BLOCK

    def __init__(self, queries: int, context: int) -> None:
        self._height = min(QUERY_BLOCK, queries)
        self._context = context
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, count: int, before: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """``(count, before + count)`` additive mask of queries that see `before` keys ahead of the first of them."""
        whole = self._masks.get(window)
        if whole is None:
            whole = self._masks[window] = self._whole(window, like)
        origin = whole.shape[1] - whole.shape[0]
        view = whole[:count, origin - before : origin + count]
        # CUDA's attention kernels load masks in wide words: a view that starts between two is a misaligned address.
        return view if view.device.type == "cpu" else view.contiguous()

    def _whole(self, window: int | None, like: torch.Tensor) -> torch.Tensor:
        before = self._context if window is None else min(self._context, window - 1)
        q = torch.arange(self._height, device=like.device).unsqueeze(1)
        k = torch.arange(-before, self._height, device=like.device).unsqueeze(0)
        hidden = k > q
        if window is not None:
            hidden |= k <= q - window
        return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
