"""GGUF checkpoints for arbi."""
