"""From a path to a loaded model: checkpoint formats, weight maps, weight formats."""
