"""The engine's thread outlives whatever its callers do."""

import asyncio
import time

import pytest

from arbi_core import SamplingParams
from arbi_core.config.load import from_values
from arbi_core.engine.async_engine import AsyncEngine
from arbi_core.engine.boot import build_engine
from arbi_core.engine.client import HealthState

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def engine(tiny_text_dir):
    made = AsyncEngine(build_engine(from_values({"model.path": str(tiny_text_dir)})))
    yield made
    made.close()


async def answer(engine, request_id, **options):
    stream = engine.generate([5, 6, 7], PARAMS, request_id=request_id, **options)
    return [t async for delta in stream for t in delta.token_ids]


@pytest.mark.parametrize("bad", [False, True])
def test_a_caller_that_leaves_before_its_request_was_taken_disturbs_nobody(engine, bad):
    """Whether the request would have been taken or refused: nobody waits for the answer any more."""

    async def main():
        engine._post(lambda: time.sleep(0.2))
        prompt = [10**9] if bad else [5, 6, 7]
        early = asyncio.ensure_future(anext(engine.generate(prompt, PARAMS, request_id="early")))
        await asyncio.sleep(0.05)
        early.cancel()
        with pytest.raises(asyncio.CancelledError):
            await early
        return await answer(engine, "late")

    assert len(asyncio.run(main())) == 4
    assert engine.health().state is HealthState.READY
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.pages_free == stats.pages_total


def test_flushing_reports_what_it_freed(engine):
    async def main():
        prompt = list(range(10, 90))
        stream = engine.generate(prompt, PARAMS, request_id="a", tenant="t")
        async for _ in stream:
            pass
        return await engine.flush_cache("other"), await engine.flush_cache("t"), await engine.flush_cache("t")

    other, mine, again = asyncio.run(main())
    assert other == 0
    assert mine == 5
    assert again == 0
