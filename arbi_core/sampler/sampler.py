"""Draws one token per row.

Order: penalties, logit bias, named processors, minimum length; greedy rows take the best; the others are divided by
their temperature, filtered by top-k, top-p and min-p, and drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import define, field, frozen

from arbi_core.engine.messages import TokenLogprobs
from arbi_core.sampler.filters import candidates, min_p_mask
from arbi_core.sampler.host_copy import HostCopy, upload
from arbi_core.sampler.logprobs import entries, score_tokens
from arbi_core.sampler.noise import draw, row_uniform
from arbi_core.sampler.params import SamplingParams
from arbi_core.sampler.penalties import TokenCounts, has_penalties

if TYPE_CHECKING:
    from arbi_core.offers import LogitsProcessor

__all__ = ["HostDraws", "Sampler", "SamplerOutput", "SamplerRow"]


@define(eq=False)
class SamplerRow:
    """What the sampler knows of one request.

    Attributes:
        params: how to draw.
        prompt_token_ids: its prompt.
        output_token_ids: what was drawn so far and is known on the host; its owner appends. May lag behind `position`.
        base_seed: seed of all its draws.
        stop_token_ids: ids that ``min_tokens`` holds back.
        position: how many tokens were drawn so far, on the way to the host or there; its owner counts.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: list[int]
    base_seed: int
    stop_token_ids: frozenset[int] = frozenset()
    counts: TokenCounts | None = field(default=None, init=False)
    edits: bool = field(init=False)
    position: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        p = self.params
        self.position = len(self.output_token_ids)
        self.edits = bool(has_penalties(p) or p.logit_bias or p.logits_processors or p.min_tokens)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt_token_ids, *self.output_token_ids]


@frozen
class HostDraws:
    """What was drawn, on the host.

    Attributes:
        token_ids: ``(R,)`` int64.
        logprobs: by row, where asked for.
        errors: by row: why nothing could be drawn (the row's token is then meaningless).
    """

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]


@define(eq=False)
class SamplerOutput:
    """What was drawn, on the device; on its way to the host.

    Attributes:
        token_ids: ``(R,)`` int64 on the device.
    """

    token_ids: torch.Tensor
    _copy: HostCopy
    _scored: list[int]
    _counts: tuple[int, ...]

    def to_host(self) -> HostDraws:
        """Wait for the copies and read them."""
        ids, best, *scores = self._copy.wait()
        tokens = ids.numpy()
        errors = _errors(best)
        logprobs: dict[int, TokenLogprobs] = {}
        if self._scored:
            found = entries([int(tokens[i]) for i in self._scored], scores, self._counts)
            logprobs = {i: entry for i, entry in zip(self._scored, found, strict=True) if i not in errors}
        return HostDraws(tokens, logprobs, errors)


class Sampler:
    """Stateless but for what rows carry.

    Args:
        processors: installed logits processors by name.
    """

    def __init__(self, processors: Mapping[str, LogitsProcessor] | None = None) -> None:
        self._processors = processors or {}

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplerRow]) -> SamplerOutput:
        """Draw one token per row of ``(R, V)`` float32 logits, which stay as they are.

        Does not wait for the device, except for rows that are edited by processors which do.
        """
        edited = self._edit(logits, rows)
        best, tokens = edited.max(dim=-1)
        drawn = [i for i, r in enumerate(rows) if not r.params.greedy]
        if drawn:
            tokens = self._draw(edited, rows, drawn, tokens)
        asked = [i for i, r in enumerate(rows) if r.params.logprobs is not None]
        counts = tuple(rows[i].params.logprobs or 0 for i in asked)
        scores: tuple[torch.Tensor, ...] = ()
        if asked:
            index = upload(asked, torch.int64, logits.device)
            scores = score_tokens(logits[index], tokens[index], counts).tensors
        return SamplerOutput(tokens, HostCopy((tokens, best, *scores)), asked, counts)

    # -- edits ------------------------------------------------------------------------------------------------------

    def _edit(self, logits: torch.Tensor, rows: Sequence[SamplerRow]) -> torch.Tensor:
        """Apply what changes logits before any choice; copies only when something does."""
        active = [i for i, r in enumerate(rows) if r.edits]
        if not active:
            return logits
        logits = logits.clone()
        for i in active:
            row, params = rows[i], rows[i].params
            if has_penalties(params):
                if row.counts is None:
                    prompt = row.prompt_token_ids if params.repetition_penalty != 1 else ()
                    row.counts = TokenCounts(prompt)
                row.counts.update(row.output_token_ids)
                row.counts.apply(logits[i], params)
            if params.logit_bias:
                ids = upload(list(params.logit_bias), torch.int64, logits.device)
                logits[i, ids] += upload(list(params.logit_bias.values()), torch.float32, logits.device)
        self._process(logits, rows, active)
        for i in active:
            row = rows[i]
            if row.stop_token_ids and row.position < row.params.min_tokens:
                logits[i].index_fill_(0, upload(sorted(row.stop_token_ids), torch.int64, logits.device), -torch.inf)
        return logits

    def _process(self, logits: torch.Tensor, rows: Sequence[SamplerRow], active: Sequence[int]) -> None:
        """Run named processors, each once over the rows that name it, in the order of its first mention."""
        names = dict.fromkeys(n for i in active for n in rows[i].params.logits_processors)
        for name in names:
            chosen = [i for i in active if name in rows[i].params.logits_processors]
            index = upload(chosen, torch.int64, logits.device)
            logits[index] = self._processors[name].apply(logits[index], [rows[i] for i in chosen])

    # -- draws ------------------------------------------------------------------------------------------------------

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[SamplerRow], drawn: list[int], tokens: torch.Tensor
    ) -> torch.Tensor:
        """Replace the greedy choice of the rows that draw."""
        filtered = [i for i in drawn if rows[i].params.top_k > 0 or rows[i].params.top_p < 1]
        filtering = set(filtered)
        plain = [i for i in drawn if i not in filtering]
        device = logits.device
        if plain:
            scaled, uniforms = self._prepare(logits, rows, plain)
            if any(rows[i].params.min_p for i in plain):
                scaled = min_p_mask(scaled, upload([rows[i].params.min_p for i in plain], torch.float32, device))
            tokens = _put(tokens, plain, draw(scaled, uniforms))
        if filtered:
            scaled, uniforms = self._prepare(logits, rows, filtered)
            values, index = candidates(scaled, [rows[i].params for i in filtered])
            choice = draw(values, uniforms).unsqueeze(-1)
            tokens = _put(tokens, filtered, index.gather(-1, choice).squeeze(-1))
        return tokens

    def _prepare(
        self, logits: torch.Tensor, rows: Sequence[SamplerRow], which: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits divided by temperature, shifted so that the best is 0 (tiny temperatures then cannot overflow)."""
        device = logits.device
        chosen = logits if len(which) == logits.shape[0] else logits.index_select(0, upload(which, torch.int64, device))
        temperature = upload([rows[i].params.temperature for i in which], torch.float32, device).unsqueeze(-1)
        uniforms = [row_uniform(rows[i].base_seed, rows[i].position) for i in which]
        scaled = (chosen - chosen.amax(-1, keepdim=True)) / temperature
        return scaled, upload(uniforms, torch.float64, device)


def _put(tokens: torch.Tensor, rows: list[int], drawn: torch.Tensor) -> torch.Tensor:
    """`tokens` with those of some rows replaced."""
    if len(rows) == len(tokens):
        return drawn
    return tokens.index_copy(0, upload(rows, torch.int64, tokens.device), drawn)


def _errors(best: torch.Tensor) -> dict[int, str]:
    """Rows whose best logit is no number have no distribution to draw from."""
    if bool(best.isfinite().all()):
        return {}
    reasons: dict[int, str] = {}
    for i, value in enumerate(best.tolist()):
        if value != value:  # NaN is the one value that differs from itself
            reasons[i] = "the model produced a NaN in the logits of this request"
        elif value == float("-inf"):
            reasons[i] = "every token is masked: the logit bias and processors of this request leave nothing to draw"
        elif value == float("inf"):
            reasons[i] = "the model produced an infinite logit for this request"
    return reasons
