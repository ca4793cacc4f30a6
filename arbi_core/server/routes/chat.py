"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from arbi_core.engine.client import EngineClient, GenerationDelta
from arbi_core.engine.messages import TokenLogprobs
from arbi_core.errors import ArbiError
from arbi_core.server.body import read_json
from arbi_core.server.errors import from_error
from arbi_core.server.generation import (
    Choice,
    EventStream,
    check_model,
    collect,
    finish_reason,
    run_unless_hung_up,
    tokenizer_of,
    usage,
)
from arbi_core.server.schemas.base import structure
from arbi_core.server.schemas.requests import IGNORED, REFUSED, ChatRequest, sampling_params
from arbi_core.text.chat import encode_chat
from arbi_core.text.tokenizer import Tokenizer

__all__ = ["chat_completions"]


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    state = request.app.state
    engine: EngineClient = state.engine
    body = structure(ChatRequest, await read_json(request, state.max_body_bytes), ignored=IGNORED, refused=REFUSED)
    check_model(engine, body.model)
    include_usage = body.include_usage
    sampling = sampling_params(body, dict(engine.info.default_sampling))
    tokenizer = tokenizer_of(engine)
    ids = await asyncio.to_thread(
        encode_chat,
        tokenizer,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        template=body.chat_template,
        variables=body.chat_template_kwargs,
    )
    deltas = engine.generate(
        ids,
        sampling,
        request_id=f"chatcmpl-{request.state.request_id}",
        priority=body.scheduling,
        timeout_s=body.timeout_s,
    )
    head = {
        "id": f"chatcmpl-{request.state.request_id}",
        "created": int(time.time()),
        "model": engine.info.name,
        "system_fingerprint": state.fingerprint,
    }
    if body.stream:
        return await _stream(deltas, head, tokenizer, body.n, include_usage=include_usage, logprobs=body.logprobs)
    choices = await run_unless_hung_up(request, collect(deltas, body.n))
    return JSONResponse({
        **head,
        "object": "chat.completion",
        "choices": [
            {
                "index": i,
                "message": {"role": "assistant", "content": "".join(c.text), "refusal": None},
                "logprobs": {"content": logprob_content(tokenizer, c.logprobs)} if body.logprobs else None,
                "finish_reason": c.reason,
            }
            for i, c in enumerate(choices)
        ],
        "usage": usage(choices),
    })  # fmt: skip


def logprob_content(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """OpenAI's chat form of log-probabilities."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return [
        {**one(e.token_id, e.logprob), "top_logprobs": [one(t, p) for t, p in e.top]}
        for e in entries
    ]  # fmt: skip


async def _stream(
    deltas: AsyncGenerator[GenerationDelta, None],
    head: dict[str, Any],
    tokenizer: Tokenizer,
    count: int,
    *,
    include_usage: bool,
    logprobs: bool,
) -> Response:
    chunks = _chunks(deltas, head, tokenizer, count, include_usage=include_usage, logprobs=logprobs)
    first = await anext(chunks)
    return EventStream(first, chunks, render_error)


def render_error(exc: Exception) -> str:
    """The last event of a stream that failed."""
    if not isinstance(exc, ArbiError):
        raise exc
    return json.dumps(from_error(exc))


async def _chunks(
    deltas: AsyncGenerator[GenerationDelta, None],
    head: dict[str, Any],
    tokenizer: Tokenizer,
    count: int,
    *,
    include_usage: bool,
    logprobs: bool,
) -> AsyncIterator[str]:
    head = {**head, "object": "chat.completion.chunk"}
    if include_usage:
        head["usage"] = None
    collected = [Choice() for _ in range(count)]

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, scores: Any = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": reason}
        return json.dumps({**head, "choices": [choice]}, ensure_ascii=False)

    opened = False
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            if not opened:
                opened = True
                for i in range(count):
                    yield chunk(i, {"role": "assistant", "content": ""})
            if delta.finish is not None:
                collected[delta.index].finish = delta.finish
            scores = {"content": logprob_content(tokenizer, delta.logprobs)} if logprobs and delta.logprobs else None
            if delta.text or scores:
                yield chunk(delta.index, {"content": delta.text}, scores=scores)
            if delta.finish is not None:
                yield chunk(delta.index, {}, finish_reason(delta.finish))
    if include_usage:
        yield json.dumps({**head, "choices": [], "usage": usage(collected)})
