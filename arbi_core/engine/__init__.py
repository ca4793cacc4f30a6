"""The engine: the loop, its thread, the offline API, and what its consumers see."""
