"""What the generation endpoints share: running completions, watching the client, logprobs, usage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from attrs import define, field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from arbi_core.engine.client import EngineClient, Finish, GenerationDelta
from arbi_core.engine.messages import FinishReason, TokenLogprobs
from arbi_core.errors import ArbiError, EngineFailedError, RequestError
from arbi_core.text.tokenizer import Tokenizer

__all__ = [
    "Choice",
    "EventStream",
    "check_count",
    "check_model",
    "collect",
    "merge",
    "run_unless_hung_up",
    "tenant_of",
    "tokenizer_of",
    "usage",
]

T = TypeVar("T")

MAX_TENANT = 256


@define(eq=False)
class Choice:
    """One completion being collected."""

    text: list[str] = field(factory=list)
    token_ids: list[int] = field(factory=list)
    logprobs: list[TokenLogprobs] = field(factory=list)
    finish: Finish | None = None

    def add(self, delta: GenerationDelta) -> None:
        """Take in news."""
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish = delta.finish or self.finish

    @property
    def reason(self) -> str:
        """OpenAI's finish reason."""
        assert self.finish is not None  # noqa: S101  # read only when the completion has ended
        return finish_reason(self.finish)


def finish_reason(finish: Finish) -> str:
    """OpenAI's finish reason; raises for ends that are no answer."""
    if finish.reason in {FinishReason.STOP, FinishReason.LENGTH}:
        return str(finish.reason)
    raise end_error(finish)


def end_error(finish: Finish) -> ArbiError:
    """The error that an unfinished completion is for its client."""
    if finish.reason is FinishReason.TIMEOUT:
        return RequestError("the request took longer than its timeout", code="timeout", status=408)
    if finish.reason is FinishReason.CANCELLED:
        return RequestError("the request was cancelled: the server is shutting down", code="cancelled", status=503)
    return EngineFailedError(finish.detail or "the engine failed on this request")


def tenant_of(request: Request) -> str:
    """On whose behalf a request runs: ``X-Cache-Tenant``, or nobody's in particular.

    Raises:
        RequestError: the header is too long or not printable ASCII.
    """
    tenant = request.headers.get("x-cache-tenant", "")
    if len(tenant) > MAX_TENANT or not (tenant.isascii() and tenant.isprintable()):
        raise RequestError(
            f"X-Cache-Tenant must be printable ASCII of at most {MAX_TENANT} characters", param="X-Cache-Tenant"
        )
    return tenant


def check_count(engine: EngineClient, count: int) -> None:
    """Raise 400 for a request of more completions than may ever run and wait together: it would be refused for ever."""
    most = engine.info.max_pending
    if count > most:
        raise RequestError(
            f"the request makes {count} completions; this server runs and queues at most {most}; send several requests",
            param="n",
            code="too_many_completions",
        )


def check_model(engine: EngineClient, name: str) -> None:
    """Raise 404 for a model that is not served."""
    if name not in {"", engine.info.name}:
        raise RequestError(
            f"the model {name!r} is not served here; this server serves {engine.info.name!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


def tokenizer_of(engine: EngineClient) -> Tokenizer:
    """The tokenizer, or a 400."""
    if engine.tokenizer is None:
        raise RequestError("this server runs without a tokenizer; send token ids to /v1/completions", param="prompt")
    return engine.tokenizer


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """OpenAI's usage block. Choices of one prompt share its tokens: the caller passes one prompt's choices together."""
    ends = [c.finish for c in choices if c.finish is not None]
    prompt = ends[0].prompt_tokens if ends else 0
    completion = sum(e.completion_tokens for e in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": ends[0].cached_tokens if ends else 0},
    }


def add_usage(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum of several prompts' usage."""
    return {
        **{k: sum(p[k] for p in parts) for k in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "prompt_tokens_details": {"cached_tokens": sum(p["prompt_tokens_details"]["cached_tokens"] for p in parts)},
    }


async def collect(deltas: AsyncGenerator[GenerationDelta, None], count: int) -> list[Choice]:
    """Run a request to its end."""
    choices = [Choice() for _ in range(count)]
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            choices[delta.index].add(delta)
    return choices


async def merge(
    streams: Sequence[AsyncGenerator[GenerationDelta, None]],
) -> AsyncGenerator[tuple[int, GenerationDelta], None]:
    """Deltas of several requests as they come, with the index of their request."""
    queue: asyncio.Queue[tuple[int, GenerationDelta | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[GenerationDelta, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for delta in stream:
                    await queue.put((index, delta))
            await queue.put((index, None))
        except Exception as exc:  # noqa: BLE001  # raised again by the reader
            await queue.put((index, exc))

    tasks = [asyncio.create_task(pump(i, s)) for i, s in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_unless_hung_up(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it as soon as the client hangs up."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_hung_up(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise RequestError("the client hung up", code="client_closed_request", status=499)
        return await task
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(watcher, task, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A server-sent-events response whose producer is cancelled at once when the client hangs up.

    Args:
        first: the first payload, awaited before headers go out so that early errors get their own status.
        rest: payloads, each one event; exceptions become an error event.
        on_error: renders an exception as a payload.
    """

    def __init__(self, first: str, rest: AsyncIterator[str], on_error: Callable[[Exception], str]) -> None:
        super().__init__()
        self._first = first
        self._rest = rest
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until done or hung up."""
        del scope
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sender = asyncio.ensure_future(self._send_all(send))
        watcher = asyncio.ensure_future(_hung_up(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sender.cancel()
            watcher.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)
            aclose = getattr(self._rest, "aclose", None)
            if aclose is not None:
                await aclose()

    async def _send_all(self, send: Send) -> None:
        async def event(payload: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {payload}\n\n".encode(), "more_body": True})

        await event(self._first)
        try:
            async for payload in self._rest:
                await event(payload)
            await event("[DONE]")
        except Exception as exc:  # noqa: BLE001  # the headers are out: the error becomes the last event
            await event(self._on_error(exc))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
