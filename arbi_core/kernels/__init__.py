"""The core's own operations, one file per op."""
