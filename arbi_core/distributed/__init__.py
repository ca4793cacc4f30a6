"""Process groups of parallel ranks."""
