"""The public names for plugin authors, in one place. Everything else in `arbi_core` may change without notice.

Names that need torch load when they are first used, so a plugin module can import this one and stay torch-free.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from arbi_core import ARBI_API_VERSION
from arbi_core.config.tree import option
from arbi_core.errors import (
    ArbiError,
    ArbiWarning,
    BackendError,
    CheckpointError,
    ConfigError,
    PluginError,
    RequestError,
    UnknownNameError,
    UnsupportedModelError,
    WeightError,
)
from arbi_core.hookspecs import hookimpl
from arbi_core.offers import (
    AdapterType,
    AudioCodec,
    Drafter,
    ExecutorFactory,
    LogitsProcessor,
    MediaEncoder,
    ParsedText,
    ReasoningParser,
    Route,
    StreamParser,
    ToolCallDelta,
    ToolParser,
)
from arbi_core.sampler.params import SamplingParams
from arbi_core.spec import (
    NONE,
    PAGED_KV,
    LayerSpec,
    ModelDims,
    ModelSpec,
    ParallelSpec,
    StateKind,
    StorageSpec,
    TensorSpec,
    WeightMap,
    WeightShardSpec,
)

if TYPE_CHECKING:
    from arbi_core.backend.base import AttentionBackend, AttnOp, BackendContext, LayerState, MetadataBuilder
    from arbi_core.distributed.group import ProcessGroup
    from arbi_core.engine.messages import RequestRecord
    from arbi_core.kernels.masks import StepMasks
    from arbi_core.loader.base import (
        Checkpoint,
        CheckpointFormat,
        LinearMethod,
        TensorSource,
        TokenizerParts,
        WeightContext,
        WeightFormat,
        WeightPiece,
    )
    from arbi_core.model.base import BuildContext, LayerCall, Model, ModelFamily
    from arbi_core.model.decoder import Decoder, DecoderLayer, DecoderSpec, GatedMLP, SelfAttention
    from arbi_core.model.embedding import VocabParallelEmbedding
    from arbi_core.model.hf_config import HFConfig
    from arbi_core.model.linear import (
        ColumnParallelLinear,
        LinearBase,
        MergedColumnParallelLinear,
        ParallelLMHead,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from arbi_core.model.loadable import LoadableModule
    from arbi_core.model.norm import RMSNorm
    from arbi_core.model.rope import RopeSpec, RotaryEmbedding, rotate
    from arbi_core.runner.batch import ForwardBatch
    from arbi_core.sampler.sampler import SamplerRow

_LAZY = {
    name: module
    for module, names in {
        "arbi_core.backend.base": "AttentionBackend AttnOp BackendContext LayerState MetadataBuilder",
        "arbi_core.distributed.group": "ProcessGroup",
        "arbi_core.engine.messages": "RequestRecord",
        "arbi_core.kernels.masks": "StepMasks",
        "arbi_core.loader.base": "Checkpoint CheckpointFormat LinearMethod TensorSource TokenizerParts WeightContext "
        "WeightFormat WeightPiece",
        "arbi_core.model.base": "BuildContext LayerCall Model ModelFamily",
        "arbi_core.model.decoder": "Decoder DecoderLayer DecoderSpec GatedMLP SelfAttention",
        "arbi_core.model.embedding": "VocabParallelEmbedding",
        "arbi_core.model.hf_config": "HFConfig",
        "arbi_core.model.linear": "ColumnParallelLinear LinearBase MergedColumnParallelLinear ParallelLMHead "
        "ReplicatedLinear RowParallelLinear",
        "arbi_core.model.loadable": "LoadableModule",
        "arbi_core.model.norm": "RMSNorm",
        "arbi_core.model.rope": "RopeSpec RotaryEmbedding rotate",
        "arbi_core.runner.batch": "ForwardBatch",
        "arbi_core.sampler.sampler": "SamplerRow",
    }.items()
    for name in names.split()
}

__all__ = [
    "ARBI_API_VERSION",
    "NONE",
    "PAGED_KV",
    "AdapterType",
    "ArbiError",
    "ArbiWarning",
    "AttentionBackend",
    "AttnOp",
    "AudioCodec",
    "BackendContext",
    "BackendError",
    "BuildContext",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFormat",
    "ColumnParallelLinear",
    "ConfigError",
    "Decoder",
    "DecoderLayer",
    "DecoderSpec",
    "Drafter",
    "ExecutorFactory",
    "ForwardBatch",
    "GatedMLP",
    "HFConfig",
    "LayerCall",
    "LayerSpec",
    "LayerState",
    "LinearBase",
    "LinearMethod",
    "LoadableModule",
    "LogitsProcessor",
    "MediaEncoder",
    "MergedColumnParallelLinear",
    "MetadataBuilder",
    "Model",
    "ModelDims",
    "ModelFamily",
    "ModelSpec",
    "ParallelLMHead",
    "ParallelSpec",
    "ParsedText",
    "PluginError",
    "ProcessGroup",
    "RMSNorm",
    "ReasoningParser",
    "ReplicatedLinear",
    "RequestError",
    "RequestRecord",
    "RopeSpec",
    "RotaryEmbedding",
    "Route",
    "RowParallelLinear",
    "SamplerRow",
    "SamplingParams",
    "SelfAttention",
    "StateKind",
    "StepMasks",
    "StorageSpec",
    "StreamParser",
    "TensorSource",
    "TensorSpec",
    "TokenizerParts",
    "ToolCallDelta",
    "ToolParser",
    "UnknownNameError",
    "UnsupportedModelError",
    "VocabParallelEmbedding",
    "WeightContext",
    "WeightError",
    "WeightFormat",
    "WeightMap",
    "WeightPiece",
    "WeightShardSpec",
    "hookimpl",
    "option",
    "rotate",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'arbi_core.api' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
