"""Tokens per second of N concurrent streams against a running server.

Usage: python benchmarks/http_streams.py URL [STREAMS] [TOKENS]

Each stream asks for TOKENS tokens past the model's end of sequence; figures are over all streams together.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time

import httpx


async def stream(client: httpx.AsyncClient, index: int, tokens: int) -> list[float]:
    """Arrival times of one stream's chunks, from the request on."""
    body = {
        "prompt": f"Once upon a time, in the year {1000 + index},",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, times = time.perf_counter(), []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if chunk["choices"]:
                    times.append(time.perf_counter() - start)
                elif chunk["usage"]["completion_tokens"] != tokens:
                    raise RuntimeError(f"stream {index} made {chunk['usage']['completion_tokens']} tokens")
    return times


async def main() -> None:
    """Warm up with one short stream, then run them all."""
    url, streams, tokens = sys.argv[1], int((sys.argv[2:] or ["8"])[0]), int((sys.argv[3:] or ["64"])[0])
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=streams)) as client:
        await stream(client, 0, 4)
        start = time.perf_counter()
        times = await asyncio.gather(*(stream(client, i, tokens) for i in range(streams)))
        total = time.perf_counter() - start
    first = statistics.median(t[0] for t in times)
    print(f"{streams} x {tokens} tokens: {streams * tokens / total:.1f} tok/s, first chunk after {first * 1e3:.0f} ms")


if __name__ == "__main__":
    asyncio.run(main())
