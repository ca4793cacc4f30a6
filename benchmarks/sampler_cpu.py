"""Time of drawing tokens on the CPU, by vocabulary, rows and parameters.

Usage: python benchmarks/sampler_cpu.py
"""

from __future__ import annotations

import time

import torch

from arbi_core import SamplingParams
from arbi_core.sampler.sampler import Sampler, SamplerRow

CASES = (
    {"temperature": 0},
    {"temperature": 0.6},
    {"temperature": 0.6, "top_k": 20},
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 0.6, "min_p": 0.05},
    {"temperature": 0, "presence_penalty": 1.0},
    {"temperature": 0, "logprobs": 5},
)


def main() -> None:
    """Print milliseconds per call."""
    torch.manual_seed(0)
    for vocab in (49_152, 151_936):
        for count in (1, 8, 64):
            logits = torch.randn(count, vocab) * 3
            for case in CASES:
                rows = [SamplerRow(SamplingParams(**case), (1, 2), [3], i) for i in range(count)]  # type: ignore[arg-type]
                sampler = Sampler()
                sampler.sample(logits, rows)
                repeats = 5 if count == 64 else 20
                start = time.perf_counter()
                for _ in range(repeats):
                    sampler.sample(logits, rows)
                ms = (time.perf_counter() - start) / repeats * 1e3
                print(f"vocabulary {vocab:>7}, {count:>3} rows, {case!s:<42} {ms:8.2f} ms")


if __name__ == "__main__":
    main()
