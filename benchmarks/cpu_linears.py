"""The CPU's ways to multiply a weight: 4-bit codes, half precision, bfloat16, float32; cold, as decoding sees them.

Usage: python benchmarks/cpu_linears.py

Weights rotate through enough copies to defeat the caches. Shapes are those of the demo model.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

SHAPES = ((3072, 576), (576, 1536), (960, 576), (49152, 576))
ROWS = (1, 2, 3, 4, 8, 16, 32, 64, 512)
COPIES = 12


def timed(work: Callable[[int], object], repeats: int) -> float:
    """Milliseconds per call; `work` is told which copy to use."""
    for i in range(2):
        work(i)
    start = time.perf_counter()
    for i in range(repeats):
        work(i)
    return (time.perf_counter() - start) / repeats * 1e3


def main() -> None:
    """Print one line per shape and number of rows."""
    torch.manual_seed(0)
    int4 = torch.ops.aten._weight_int4pack_mm_for_cpu
    half = torch.ops.quantized.linear_dynamic_fp16
    for out, width in SHAPES:
        copies = COPIES if out < 10_000 else 1
        dense = [torch.randn(out, width) * 0.05 for _ in range(copies)]
        packed = [torch.ops.quantized.linear_prepack_fp16(w, None) for w in dense]
        codes = [
            torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (out, width), dtype=torch.int32), 2)
            for _ in range(copies)
        ]
        scales = (torch.rand(width // 32, out, 2) * 0.01).bfloat16()
        brain = [w.bfloat16() for w in dense]
        for rows in ROWS:
            x = torch.randn(rows, width)
            repeats = 5 if rows * out > 1_000_000 else 30

            def four(i: int) -> object:
                return int4(x.bfloat16(), codes[i % copies], 32, scales).float()  # noqa: B023  # called at once

            times = {
                "4-bit": timed(four, repeats),
                "half": timed(lambda i: half(x, packed[i % copies]), repeats),  # noqa: B023
                "bf16": timed(lambda i: F.linear(x.bfloat16(), brain[i % copies]), repeats),  # noqa: B023
                "float32": timed(lambda i: F.linear(x, dense[i % copies]), repeats),  # noqa: B023
            }
            shown = ", ".join(f"{name} {ms:8.3f}" for name, ms in times.items())
            print(f"({out:>5}, {width:>4}) x {rows:>3} rows, ms: {shown}")


if __name__ == "__main__":
    main()
