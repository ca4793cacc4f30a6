"""Penalties, biases and bans of one row, updated by the tokens that are new since the last step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from arbi_core.sampler.params import SamplingParams

__all__ = ["TokenCounts", "has_penalties"]


def has_penalties(params: SamplingParams) -> bool:
    """Whether past tokens change the logits."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


class TokenCounts:
    """How often each token occurred, as growing arrays: a step costs the new tokens, not the vocabulary.

    Presence and frequency penalties count the output only (OpenAI's contract); the repetition penalty sees prompt and
    output (Keskar et al., 2019).

    Args:
        prompt: token ids that count as seen, with an output count of zero.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        seen = np.unique(np.asarray(prompt, dtype=np.int64))
        self._size = len(seen)
        self._ids = np.zeros(max(64, 2 * self._size), dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._ids[: self._size] = seen
        self._where = {int(t): i for i, t in enumerate(seen)}
        self._taken = 0

    def update(self, output: Sequence[int]) -> None:
        """Count the tokens that came since the last call."""
        for token in output[self._taken :]:
            at = self._where.get(token)
            if at is None:
                at = self._where[token] = self._size
                if self._size == len(self._ids):
                    self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                    self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
                self._ids[at] = token
                self._size += 1
            self._counts[at] += 1
        self._taken = len(output)

    def apply(self, row: torch.Tensor, params: SamplingParams) -> None:
        """Edit one row of logits ``(V,)`` in place."""
        ids = torch.from_numpy(self._ids[: self._size]).to(row.device)
        counts = torch.from_numpy(self._counts[: self._size]).to(row.device)
        logits = row[ids]
        if params.repetition_penalty != 1:
            scale = params.repetition_penalty
            logits = torch.where(logits > 0, logits / scale, logits * scale)
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        row[ids] = logits
