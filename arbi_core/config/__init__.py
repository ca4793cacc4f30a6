"""The configuration tree and how values reach it. Torch-free."""
