"""The one structure that describes a step to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["ForwardBatch"]


@define
class ForwardBatch:
    """One step: B rows (requests), N tokens (flat, row after row).

    Device tensors are views into persistent buffers with stable addresses; ``*_host`` are numpy twins of the same
    values, so that no code needs to read the device.

    Attributes:
        input_ids: ``(N,)`` int64.
        positions: ``(N,)`` int64, absolute position of each token.
        cu_seqlens_q: ``(B + 1,)`` int32, row boundaries in the flat token axis.
        seq_lens: ``(B,)`` int32, context length of each row AFTER this step.
        slot_mapping: ``(N,)`` int64, ``page_id * page_size + offset`` where each token's state is written.
        block_table: ``(B, W)`` int32, page ids of each row, padded with the null page 0.
        state_rows: ``(B,)`` int64, row-pool row of each request (0, the zero sentinel, when the model has none).
        logit_rows: ``(R,)`` int64, flat token indices whose logits are wanted.
        page_size: tokens per page.
        num_tokens: N.
        max_query_len: longest row of this step, in tokens.
        max_seq_len: longest context of this step, in tokens.
        is_decode: every row has exactly one token.

    Decode steps may be padded with rows of one token on the null page. Where all kinds of state are capturable (see
    `arbi_core.backend.base.MetadataBuilder`), decode steps leave `block_table_host` empty.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    state_rows: torch.Tensor
    logit_rows: torch.Tensor
    cu_seqlens_q_host: np.ndarray
    seq_lens_host: np.ndarray
    block_table_host: np.ndarray
    state_rows_host: np.ndarray
    page_size: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    is_decode: bool

    @property
    def num_rows(self) -> int:
        """B."""
        return int(self.seq_lens.shape[0])
