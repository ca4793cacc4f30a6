"""Executes steps: rows, persistent buffers, batch building, forward, draw."""
