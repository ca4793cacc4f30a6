"""Moves small tensors between host and device without holding up either."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["HostCopy", "upload"]


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``(n,)`` tensor on `device`. The copy takes its place in the stream; a plain one would wait for the device."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class HostCopy:
    """Copies on their way to the host.

    Args:
        tensors: on one device; on the CPU they are handed back as they are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            self._host = tuple(tensors)
            return
        self._host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the host; waits until the device has filled them."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host
