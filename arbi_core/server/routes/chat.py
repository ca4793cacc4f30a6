"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from arbi_core.engine.client import EngineClient, GenerationDelta
from arbi_core.errors import ArbiError
from arbi_core.server.body import read_json
from arbi_core.server.errors import from_error
from arbi_core.server.generation import (
    Choice,
    EventStream,
    check_count,
    check_model,
    collect,
    finish_reason,
    run_unless_hung_up,
    tenant_of,
    tokenizer_of,
    usage,
)
from arbi_core.server.schemas.base import structure
from arbi_core.server.schemas.requests import IGNORED, REFUSED, ChatRequest, sampling_params
from arbi_core.text.chat import render_chat
from arbi_core.text.logprobs import chat_logprobs
from arbi_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from arbi_core.offers import ReasoningParser, StreamParser

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
    prompt, ids = await asyncio.to_thread(_render, tokenizer, body)
    parser: ReasoningParser | None = state.reasoning_parser
    check_count(engine, body.n)
    answers = [_Answer(parser.start(prompt) if parser else None) for _ in range(body.n)]
    deltas = engine.generate(
        ids,
        sampling,
        request_id=f"chatcmpl-{request.state.request_id}",
        tenant=tenant_of(request),
        priority=body.scheduling,
        cache_enabled=body.cache_enabled,
        timeout_s=body.timeout_s,
        job_id=body.job_id,
    )
    head = {
        "id": f"chatcmpl-{request.state.request_id}",
        "created": int(time.time()),
        "model": engine.info.name,
        "system_fingerprint": state.fingerprint,
    }
    if body.stream:
        chunks = _chunks(deltas, head, tokenizer, answers, include_usage=include_usage, logprobs=body.logprobs)
        return EventStream(await anext(chunks), chunks, render_error)
    choices = await run_unless_hung_up(request, collect(deltas, body.n))
    return JSONResponse({
        **head,
        "object": "chat.completion",
        "choices": [
            {
                "index": i,
                "message": {"role": "assistant", **answers[i].whole("".join(c.text)), "refusal": None},
                "logprobs": {"content": chat_logprobs(tokenizer, c.logprobs)} if body.logprobs else None,
                "finish_reason": c.reason,
            }
            for i, c in enumerate(choices)
        ],
        "usage": usage(choices),
    })  # fmt: skip


def _render(tokenizer: Tokenizer, body: ChatRequest) -> tuple[str, list[int]]:
    """The prompt as text and as token ids."""
    text = render_chat(
        tokenizer,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        template=body.chat_template,
        variables=body.chat_template_kwargs,
    )
    return text, tokenizer.encode(text, add_special_tokens=False)


class _Answer:
    """Splits one answer into what was thought and what was said."""

    def __init__(self, parser: StreamParser | None) -> None:
        self._parser = parser

    def part(self, text: str, *, last: bool) -> dict[str, str]:
        """Fields of a streamed delta; empty if nothing is certain yet."""
        if self._parser is None:
            return {"content": text} if text else {}
        pieces = [self._parser.feed(text)] + ([self._parser.flush()] if last else [])
        reasoning, content = "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)
        return {k: v for k, v in (("reasoning_content", reasoning), ("content", content)) if v}

    def whole(self, text: str) -> dict[str, str]:
        """Fields of a message; ``reasoning_content`` is absent where there was none."""
        return {"content": "", **self.part(text, last=True)}


def render_error(exc: Exception) -> str:
    """The last event of a stream that failed."""
    if not isinstance(exc, ArbiError):
        raise exc
    return json.dumps(from_error(exc))


async def _chunks(
    deltas: AsyncGenerator[GenerationDelta, None],
    head: dict[str, Any],
    tokenizer: Tokenizer,
    answers: Sequence[_Answer],
    *,
    include_usage: bool,
    logprobs: bool,
) -> AsyncIterator[str]:
    count = len(answers)
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
            scores = {"content": chat_logprobs(tokenizer, delta.logprobs)} if logprobs and delta.logprobs else None
            parts = answers[delta.index].part(delta.text, last=delta.finish is not None)
            if parts or scores:
                yield chunk(delta.index, parts or {"content": ""}, scores=scores)
            if delta.finish is not None:
                yield chunk(delta.index, {}, finish_reason(delta.finish))
    if include_usage:
        yield json.dumps({**head, "choices": [], "usage": usage(collected)})
