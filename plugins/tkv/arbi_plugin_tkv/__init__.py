"""TKV: a compressed KV cache for arbi."""
