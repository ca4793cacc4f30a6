"""The OpenAI-compatible HTTP server: starlette over an `EngineClient`. Torch-free."""
