"""Plain data that describes a model, its state and its weights. Torch-free."""

from arbi_core.spec.layers import LayerSpec, ModelDims, ModelSpec
from arbi_core.spec.parallel import ParallelSpec
from arbi_core.spec.state import NONE, PAGED_KV, StateKind
from arbi_core.spec.storage import StorageSpec, TensorSpec
from arbi_core.spec.weights import WeightMap, WeightShardSpec

__all__ = [
    "NONE",
    "PAGED_KV",
    "LayerSpec",
    "ModelDims",
    "ModelSpec",
    "ParallelSpec",
    "StateKind",
    "StorageSpec",
    "TensorSpec",
    "WeightMap",
    "WeightShardSpec",
]
