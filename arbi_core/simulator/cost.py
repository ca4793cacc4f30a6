"""How long a device takes for a step: a sum of terms, each linear in what the step computes."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve, fields, frozen

from arbi_core.errors import ConfigError

__all__ = ["PRESETS", "CostModel", "Preset", "override"]


@frozen(kw_only=True)
class CostModel:
    """Seconds of a step with rows: the sum of all terms.

    Attributes:
        step_s: every step, whatever it holds: reading the weights once, launching the kernels.
        prompt_token_s: each prompt token: the matrix products.
        row_s: each decoding row: its share of the products, its draw.
        context_s: each token of context that a decoding row attends to: reading keys and values.
        prompt_context_s: each pair of a prompt token and a token that it attends to.
        host_s: deciding the step and taking in its output. It is hidden behind the device where the engine runs ahead.
    """

    step_s: float
    prompt_token_s: float
    row_s: float
    context_s: float
    prompt_context_s: float = 0.0
    host_s: float = 0.0

    def decode(self, rows: int, context: int) -> float:
        """Seconds of the decoding rows, which attend to `context` tokens together."""
        return rows * self.row_s + context * self.context_s

    def chunk(self, before: int, tokens: int) -> float:
        """Seconds of a prompt piece that follows `before` tokens."""
        pairs = tokens * before + tokens * (tokens + 1) // 2
        return tokens * self.prompt_token_s + pairs * self.prompt_context_s

    def prompt_alone(self, tokens: int, per_step: int, before: int = 0) -> float:
        """Seconds of a prompt that has the device to itself and gets `per_step` tokens in each step."""
        steps = -(-tokens // per_step)
        return steps * (self.step_s + self.host_s) + self.chunk(before, tokens)


@frozen(kw_only=True)
class Preset:
    """A machine with a model.

    Attributes:
        cost: its cost model.
        pool_tokens: tokens that its page pool holds.
        depth: steps that the engine runs ahead.
        source: where the coefficients come from.
    """

    cost: CostModel
    pool_tokens: int
    depth: int
    source: str


PRESETS = {
    "h200-8b": Preset(
        cost=CostModel(
            step_s=4.5e-3,
            prompt_token_s=30e-6,
            row_s=10e-6,
            context_s=35e-9,
            prompt_context_s=1.3e-9,
            host_s=0.8e-3,
        ),
        pool_tokens=800_000,
        depth=1,
        source=(
            "estimated, not measured: 8e9 parameters in bfloat16 read at 4 TB/s plus launches; 16 GFLOP a token at 530 "
            "TFLOP/s; 131 kB of keys and values a token at 3.7 TB/s; 524 kFLOP a pair at 400 TFLOP/s"
        ),
    ),
    "cpu-demo": Preset(
        cost=CostModel(step_s=16e-3, prompt_token_s=2.0e-3, row_s=5.8e-3, context_s=15e-6, host_s=0.5e-3),
        pool_tokens=46_000,
        depth=0,
        source="fitted to the figures of the demo model in benchmarks/README.md",
    ),
}
"""By name of `arbi simulate --cost`."""


def override(cost: CostModel, entries: Iterable[str]) -> CostModel:
    """Replace coefficients by ``NAME=SECONDS`` entries.

    Raises:
        ConfigError: an unknown name, or no number that is at least 0.
    """
    names = [f.name for f in fields(CostModel)]
    for entry in entries:
        name, _, text = entry.partition("=")
        if name not in names:
            raise ConfigError("--cost-term", f"{name!r} is no term of the cost model", "one of: " + ", ".join(names))
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise ConfigError("--cost-term", f"{text!r} is not a number of seconds in {entry!r}", f"as in {name}=0.001")
        cost = evolve(cost, **{name: value})
    return cost
