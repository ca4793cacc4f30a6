"""A real server on a thread, with its engine at hand."""

import asyncio
import contextlib
import threading
import time

import httpx
import openai

from arbi_core.config.load import from_values
from arbi_core.config.tree import HttpConfig
from arbi_core.engine.async_engine import AsyncEngine
from arbi_core.engine.boot import build_engine
from arbi_core.server.serve import bind, serve

GREEDY = {"temperature": 0, "max_tokens": 8}
CHAT = [{"role": "user", "content": "hello there"}]


class Server:
    """A server on a thread, with its engine at hand."""

    def __init__(self, path, http=None, **values):
        settings = {"model.path": str(path), "cache.num_pages": 200, "scheduler.max_num_batched_tokens": 64}
        settings |= {"server.served_model_name": "tiny", **values}
        self.engine = AsyncEngine(build_engine(from_values(settings)))
        self.config = HttpConfig(port=0, served_model_name="tiny", **(http or {}))
        self.sock = bind(self.config)
        started = threading.Event()

        def ready(url):
            self.url = url
            started.set()

        async def main():
            self.task = asyncio.current_task()
            self.loop = asyncio.get_running_loop()
            with contextlib.suppress(asyncio.CancelledError):
                await serve(self.engine, self.config, self.sock, registry=self.engine.registry, ready=ready)

        self.thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
        self.thread.start()
        assert started.wait(30)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path="/v1/chat/completions", **body):
        return httpx.post(self.url + path, json=body, timeout=60)

    def wait_idle(self):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            stats = self.engine.stats()
            if not stats.running and not stats.waiting and stats.pages_free == stats.pages_total:
                return
            time.sleep(0.02)
        raise AssertionError(f"pages or requests are left: {self.engine.stats()}")

    def close(self):
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.thread.join(20)
        self.engine.close()
        self.sock.close()
