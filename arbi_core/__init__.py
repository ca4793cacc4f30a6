"""arbi: an LLM inference framework and OpenAI-compatible server whose every capability is a plugin.

Importing this package is cheap and torch-free; `LLM` and friends load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "ARBI_API_VERSION",
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

__version__ = "0.1.0"

ARBI_API_VERSION = 1
"""Version of the hook API. A plugin module states ``arbi_api_version``; another number is refused."""

_LAZY = {
    "LLM": "arbi_core.engine.llm",
    "CompletionOutput": "arbi_core.engine.outputs",
    "RequestOutput": "arbi_core.engine.outputs",
    "SamplingParams": "arbi_core.sampler.params",
}

if TYPE_CHECKING:
    from arbi_core.engine.llm import LLM
    from arbi_core.engine.outputs import CompletionOutput, RequestOutput
    from arbi_core.sampler.params import SamplingParams


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'arbi_core' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)
