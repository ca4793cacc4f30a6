"""Which form of an operation runs where."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

__all__ = ["uses_triton"]


def uses_triton(x: torch.Tensor) -> bool:
    """Whether `x` lies where the Triton form runs: on a CUDA device, or anywhere under Triton's interpreter."""
    return _installed() and (x.is_cuda or _interpreted())


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
