"""The engine on its own thread, behind the asyncio face that servers use.

Commands go down through one queue; each step's output comes up in one call into the event loop. HTTP, tokenizing and
detokenizing therefore never wait for a step, nor a step for them.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from attrs import define, evolve

from arbi_core.engine.client import GenerationDelta, Health, HealthState, ModelInfo
from arbi_core.engine.messages import EngineStats, FinishOut, FinishReason, OutputBatch, Priority, SubmitMsg, TokenOut
from arbi_core.errors import EngineClosedError, EngineFailedError, RequestError
from arbi_core.text.assembler import OutputAssembler

if TYPE_CHECKING:
    from arbi_core.engine.boot import BuiltEngine
    from arbi_core.engine.core import EngineCore
    from arbi_core.sampler.params import SamplingParams
    from arbi_core.text.tokenizer import Tokenizer

__all__ = ["AsyncEngine"]

log = logging.getLogger("arbi.engine")

T = TypeVar("T")


@define(eq=False)
class _Stream:
    """One live completion: where its news go."""

    assembler: OutputAssembler
    inbox: asyncio.Queue[GenerationDelta]


class AsyncEngine:
    """Implements `arbi_core.engine.client.EngineClient`.

    Args:
        built: the engine; this object owns it from now on.
    """

    def __init__(self, built: BuiltEngine) -> None:
        self.registry = built.registry
        self._core: EngineCore = built.core
        self._tokenizer = built.tokenizer
        self._end_ids = built.stop_token_ids
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stats = built.core.stats()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="arbi-engine", daemon=True)
        self._thread.start()

    # -- the face ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """The served model."""
        return self._core.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None under ``skip_tokenizer_init``."""
        return self._tokenizer

    def stats(self) -> EngineStats:
        """The reading after the last step."""
        return self._stats

    def health(self) -> Health:
        """Whether requests are served now."""
        if not self._thread.is_alive() and not self._closed:
            return Health(HealthState.FAILED, "the engine thread has ended")
        return self._core.health

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        tenant: str = "",
        priority: Priority | None = None,
        cache_enabled: bool = True,
        timeout_s: float | None = None,
        job_id: str | None = None,
    ) -> AsyncGenerator[GenerationDelta, None]:
        """See the protocol."""
        if job_id is not None and sampling.n > 1:
            raise RequestError("a request with a job_id makes one completion", param="n")
        self._loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[GenerationDelta] = asyncio.Queue()
        keys = [f"{request_id}-{i}" for i in range(sampling.n)]
        stop = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._end_ids)
        for i, key in enumerate(keys):
            self._streams[key] = _Stream(OutputAssembler(self._tokenizer, sampling, index=i), inbox)
        messages = [
            SubmitMsg(
                request_id=key,
                prompt_token_ids=tuple(prompt_token_ids),
                sampling=evolve(sampling, n=1, seed=None if sampling.seed is None else sampling.seed + i),
                stop_token_ids=stop,
                tenant=tenant,
                priority=priority,
                cache_enabled=cache_enabled,
                timeout_s=timeout_s,
                arrival=time.monotonic(),
                job_id=job_id,
            )
            for i, key in enumerate(keys)
        ]
        open_ = set(range(len(keys)))
        try:
            await self._call(lambda: self._submit_all(messages))
            while open_:
                delta = await inbox.get()
                if delta.finish is not None:
                    open_.discard(delta.index)
                yield delta
        finally:
            for i, key in enumerate(keys):
                self._streams.pop(key, None)
                if i in open_:
                    self._post(_cancel(self._core, key))

    async def flush_cache(self, tenant: str | None = None) -> int:
        """See the protocol."""
        return await self._call(lambda: self._core.flush_cache(tenant))

    async def drain(self, timeout_s: float) -> bool:
        """See the protocol."""
        self._post(self._core.begin_drain)
        deadline = time.monotonic() + timeout_s
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        finished = not self._streams
        if not finished:
            await self._call(self._core.cancel_all)
            await asyncio.sleep(0.05)
        return finished

    def close(self) -> None:
        """Stop the thread and release the device. Idempotent."""
        if not self._closed:
            self._closed = True
            self._commands.put(None)
            self._thread.join(timeout=30)

    # -- between the threads ------------------------------------------------------------------------------------------

    def _submit_all(self, messages: Sequence[SubmitMsg]) -> None:
        """Queue all completions of a request, or none."""
        done: list[str] = []
        try:
            for message in messages:
                self._core.submit(message)
                done.append(message.request_id)
        except BaseException:
            for key in done:
                self._core.cancel(key)
            raise

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    async def _call(self, command: Callable[[], T]) -> T:
        """Run a command on the engine's thread; returns what it returns, raises what it raises."""
        if self._closed or not self._thread.is_alive():
            raise EngineClosedError("the engine is closed")
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked is gone
            try:
                result = command()
            except BaseException as exc:  # noqa: BLE001  # carried to the caller
                future.set_exception(exc)
            else:
                future.set_result(result)

        self._post(run)
        return await asyncio.wrap_future(future)

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands():
                if not self._core.has_work:
                    self._core.tick()
                else:
                    batch = self._core.step()
                    self._stats = self._core.stats()
                    if batch.tokens or batch.finished:
                        self._publish(batch)
        except BaseException as exc:
            log.critical("the engine thread ends: %s", exc, exc_info=exc)
            self._core.fail(f"{type(exc).__name__}: {exc}")
            self._publish(self._core.drain_finished())
            raise EngineFailedError(str(exc)) from exc
        finally:
            self.registry.engine_closing(self._core)
            self._core.close()
            self._publish(self._core.drain_finished())

    def _take_commands(self) -> bool:
        """Run what was posted, waiting while there is nothing else to do; false ends the thread."""
        wait = self._core.wait_s()
        while True:
            try:
                command = self._commands.get(block=wait > 0, timeout=wait or None)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = 0.0

    def _publish(self, batch: OutputBatch) -> None:
        loop = self._loop
        if loop is not None and (batch.tokens or batch.finished):
            try:
                loop.call_soon_threadsafe(self._apply, batch)
            except RuntimeError:
                log.debug("the event loop is closed; %d results are dropped", len(batch.finished))

    # -- the event loop's thread --------------------------------------------------------------------------------------

    def _apply(self, batch: OutputBatch) -> None:
        ends = {f.request_id: f for f in batch.finished}
        for out in batch.tokens:
            self._apply_tokens(out, ends.get(out.request_id))
        for end in batch.finished:
            stream = self._streams.get(end.request_id)
            if stream is not None:
                stream.inbox.put_nowait(stream.assembler.finish(end))

    def _apply_tokens(self, out: TokenOut, end: FinishOut | None) -> None:
        stream = self._streams.get(out.request_id)
        if stream is None:
            return
        delta = stream.assembler.tokens(out, None if end is None else end.stop_token_id)
        if delta is not None:
            stream.inbox.put_nowait(delta)
        if stream.assembler.stopped and end is None:
            self._post(_cancel(self._core, out.request_id, FinishReason.STOP))


def _cancel(core: EngineCore, key: str, reason: FinishReason = FinishReason.CANCELLED) -> Callable[[], None]:
    return lambda: core.cancel(key, reason)
