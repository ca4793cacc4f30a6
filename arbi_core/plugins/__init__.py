"""Discovery of plugins, and the frozen registry of what they offer. Torch-free."""

from arbi_core.plugins.manager import load_registry
from arbi_core.plugins.registry import PluginInfo, PluginStatus, Registry

__all__ = ["PluginInfo", "PluginStatus", "Registry", "load_registry"]
