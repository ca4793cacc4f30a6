"""Triton forms of the operations: imported only where Triton runs."""
