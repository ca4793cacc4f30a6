"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from arbi_core.engine.client import EngineClient, GenerationDelta
from arbi_core.errors import RequestError
from arbi_core.server.body import read_json
from arbi_core.server.generation import (
    Choice,
    EventStream,
    add_usage,
    check_count,
    check_model,
    collect,
    finish_reason,
    merge,
    run_unless_hung_up,
    tenant_of,
    tokenizer_of,
    usage,
)
from arbi_core.server.routes.chat import render_error
from arbi_core.server.schemas.base import structure
from arbi_core.server.schemas.requests import IGNORED, REFUSED, CompletionRequest, sampling_params
from arbi_core.text.logprobs import CompletionLogprobs
from arbi_core.text.tokenizer import Tokenizer

__all__ = ["completions"]

MAX_PROMPTS = 256


async def completions(request: Request) -> Response:
    """Complete one prompt or several."""
    state = request.app.state
    engine: EngineClient = state.engine
    body = structure(
        CompletionRequest, await read_json(request, state.max_body_bytes), ignored=IGNORED, refused=REFUSED
    )
    check_model(engine, body.model)
    include_usage = body.include_usage
    sampling = sampling_params(body, dict(engine.info.default_sampling))
    prompts = await asyncio.to_thread(_prompts, engine, body.prompt)
    check_count(engine, body.n * len(prompts))
    if body.job_id is not None and len(prompts) > 1:
        raise RequestError("a request with a job_id has one prompt", param="job_id")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo together with logprobs is not supported", param="echo", code="unsupported_parameter")
    request_id = f"cmpl-{request.state.request_id}"
    streams = [
        engine.generate(
            ids,
            sampling,
            request_id=f"{request_id}-p{p}",
            tenant=tenant_of(request),
            priority=body.scheduling,
            cache_enabled=body.cache_enabled,
            timeout_s=body.timeout_s,
            job_id=body.job_id,
        )
        for p, ids in enumerate(prompts)
    ]
    tokenizer = engine.tokenizer
    echoes = [tokenizer_of(engine).decode(ids) if body.echo else "" for ids in prompts]
    head = {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": engine.info.name,
        "system_fingerprint": state.fingerprint,
    }
    if body.stream:
        chunks = _chunks(streams, head, tokenizer, echoes, body, include_usage=include_usage)
        return EventStream(await anext(chunks), chunks, render_error)
    results = await run_unless_hung_up(request, _collect_all(streams, body.n))
    choices = [
        {
            "index": p * body.n + i,
            "text": echoes[p] + "".join(c.text),
            "logprobs": _scores(tokenizer, body).block(c.logprobs) if body.logprobs is not None else None,
            "finish_reason": c.reason,
            **({"token_ids": c.token_ids} if tokenizer is None else {}),
        }
        for p, result in enumerate(results)
        for i, c in enumerate(result)
    ]
    return JSONResponse({**head, "choices": choices, "usage": add_usage([usage(r) for r in results])})


async def _collect_all(streams: Sequence[AsyncGenerator[GenerationDelta, None]], count: int) -> list[list[Choice]]:
    """Run all prompts together; the first that fails cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect(s, count)) for s in streams]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [t.result() for t in tasks]


def _prompts(engine: EngineClient, prompt: str | list[int] | list[str] | list[list[int]]) -> list[list[int]]:
    """Token ids of every prompt."""
    if isinstance(prompt, str):
        return [tokenizer_of(engine).encode(prompt)]
    if not prompt:
        raise RequestError("prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [[int(t) for t in prompt]]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"{len(prompt)} prompts in one request; at most {MAX_PROMPTS}", param="prompt")
    if isinstance(prompt[0], str):
        return tokenizer_of(engine).encode_batch([str(p) for p in prompt])
    return [list(p) for p in prompt]


def _scores(tokenizer: Tokenizer | None, body: CompletionRequest) -> CompletionLogprobs:
    """The log-probabilities of one choice. Echo and logprobs exclude each other, so its text begins at 0."""
    return CompletionLogprobs(tokenizer, skip_special_tokens=body.skip_special_tokens)


async def _chunks(
    streams: Sequence[AsyncGenerator[GenerationDelta, None]],
    head: dict[str, Any],
    tokenizer: Tokenizer | None,
    echoes: Sequence[str],
    body: CompletionRequest,
    *,
    include_usage: bool,
) -> AsyncIterator[str]:
    if include_usage:
        head = {**head, "usage": None}
    collected = [[Choice() for _ in range(body.n)] for _ in streams]
    scorers = [_scores(tokenizer, body) for _ in range(len(streams) * body.n)]
    started: set[int] = set()
    async for prompt, delta in merge(streams):
        index = prompt * body.n + delta.index
        text = delta.text if index in started else echoes[prompt] + delta.text
        started.add(index)
        scores = None
        if body.logprobs is not None and delta.logprobs:
            scores = scorers[index].block(delta.logprobs)
        reason = None
        if delta.finish is not None:
            collected[prompt][delta.index].finish = delta.finish
            reason = finish_reason(delta.finish)
        if text or scores or reason or tokenizer is None:
            choice = {"index": index, "text": text, "logprobs": scores, "finish_reason": reason}
            if tokenizer is None:
                choice["token_ids"] = list(delta.token_ids)
            yield json.dumps({**head, "choices": [choice]}, ensure_ascii=False)
    if include_usage:
        yield json.dumps({**head, "choices": [], "usage": add_usage([usage(c) for c in collected])})
