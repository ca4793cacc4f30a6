"""The offline API: a model, prompts in, completions out. The names are those that vLLM's users know."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from attrs import evolve

from arbi_core.engine.messages import FinishReason, OutputBatch, SubmitMsg
from arbi_core.engine.outputs import CompletionOutput, RequestOutput
from arbi_core.errors import ConfigError, RequestError
from arbi_core.sampler.params import SamplingParams
from arbi_core.text.assembler import OutputAssembler

if TYPE_CHECKING:
    from types import TracebackType

    from arbi_core.config.tree import ServerConfig
    from arbi_core.engine.client import ModelInfo
    from arbi_core.engine.messages import EngineStats
    from arbi_core.text.tokenizer import Tokenizer

__all__ = ["LLM"]

ARGUMENTS = {
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "load_format": "model.load_format",
    "max_model_len": "model.max_model_len",
    "device": "model.device",
    "enforce_eager": "model.enforce_eager",
    "seed": "model.seed",
    "skip_tokenizer_init": "model.skip_tokenizer_init",
    "kv_cache_dtype": "cache.kv_dtype",
    "page_size": "cache.page_size",
    "block_size": "cache.page_size",
    "num_pages": "cache.num_pages",
    "gpu_memory_utilization": "cache.gpu_memory_utilization",
    "cpu_kv_gib": "cache.cpu_kv_gib",
    "enable_prefix_caching": "cache.enable_prefix_caching",
    "backends": "cache.backends",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "max_prefill_chunk": "scheduler.max_prefill_chunk",
    "executor": "scheduler.executor",
    "tensor_parallel_size": "scheduler.tensor_parallel_size",
    "async_output": "scheduler.async_output",
    "host_tier_gib": "cache.host_tier_gib",
    "disk_tier_dir": "cache.disk_tier_dir",
    "disk_tier_gib": "cache.disk_tier_gib",
    "disk_tier_encrypt": "cache.disk_tier_encrypt",
    "tier_ttl_s": "cache.tier_ttl_s",
    "tier_min_tokens": "cache.tier_min_tokens",
    "disk_tier_min_tokens": "cache.disk_tier_min_tokens",
    "savepoint_gib": "cache.savepoint_gib",
    "plugins": "plugins",
    "plugins_only": "plugins_policy.only",
}
"""Keyword arguments of `LLM` and the settings that they are."""


class LLM:
    """A model ready to generate, in this process and on this thread.

    Under torchrun only rank 0 gets one: the other processes serve it inside the constructor and exit when it closes.

    Args:
        model: directory, ``.gguf`` file, hub id, or ``demo``.
        config: a whole configuration to start from; keyword arguments win over it.
        **arguments: any of ``tokenizer``, ``dtype``, ``load_format``, ``max_model_len``, ``device``,
            ``enforce_eager``, ``seed``, ``skip_tokenizer_init``, ``kv_cache_dtype``, ``page_size``, ``num_pages``,
            ``gpu_memory_utilization``, ``cpu_kv_gib``, ``enable_prefix_caching``, ``backends``, ``max_num_seqs``,
            ``max_num_batched_tokens``, ``max_prefill_chunk``, ``executor``, ``tensor_parallel_size``,
            ``async_output``, ``host_tier_gib``, ``disk_tier_dir``, ``disk_tier_gib``, ``disk_tier_encrypt``,
            ``tier_ttl_s``, ``tier_min_tokens``, ``disk_tier_min_tokens``, ``savepoint_gib``, ``plugins`` (sections by
            plugin name), ``plugins_only``; each is the setting of that name, see ``arbi serve --help``.

    Raises:
        ConfigError: an unknown argument or a bad value.
        ArbiError: the model cannot be found, read, understood or fitted.
    """

    def __init__(self, model: str = "demo", *, config: ServerConfig | None = None, **arguments: Any) -> None:
        from arbi_core.engine.boot import build_engine, follows

        settings = _configure(model, config, arguments)
        if follows(settings):
            from arbi_core.distributed.worker import run_follower

            raise SystemExit(run_follower(settings))
        self._built = build_engine(settings)
        self._core = self._built.core
        self._ids = itertools.count()

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """The served model."""
        return self._core.info

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that fit in the KV pool."""
        return self._core.info.kv_capacity_tokens

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self._core.stats()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `ConfigError` under ``skip_tokenizer_init``."""
        if self._built.tokenizer is None:
            raise ConfigError("model.skip_tokenizer_init", "there is no tokenizer", "pass token ids")
        return self._built.tokenizer

    # -- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; all of them run together.

        Args:
            prompts: a text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or a list of these.
            sampling_params: one for all prompts, or one per prompt; default: the model's published defaults.
            use_tqdm: show progress on standard error.

        Returns:
            One result per prompt, in order.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing has been generated then.
        """
        items = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams(**self.info.default_sampling)
        params = (
            [sampling_params] * len(items) if isinstance(sampling_params, SamplingParams) else list(sampling_params)
        )
        if len(params) != len(items):
            raise RequestError(f"{len(items)} prompts came with {len(params)} sampling parameters")
        encoded = [self._encode(item) for item in items]
        return self._run([(text, ids, p) for (text, ids), p in zip(encoded, params, strict=True)], show=use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of conversations, rendered with the model's chat template."""
        from arbi_core.text.chat import encode_chat

        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [
            {
                "prompt_token_ids": encode_chat(
                    self.get_tokenizer(),
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    tools=tools,
                    template=chat_template,
                    variables=chat_template_kwargs,
                )
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _encode(self, item: str | Mapping[str, Any]) -> tuple[str | None, list[int]]:
        if isinstance(item, str):
            return item, self.get_tokenizer().encode(item)
        unknown = set(item) - {"prompt", "prompt_token_ids"}
        if unknown:
            raise RequestError(f"a prompt has unknown keys: {', '.join(sorted(unknown))}", param="prompt")
        if "prompt_token_ids" in item:
            return item.get("prompt"), [int(t) for t in item["prompt_token_ids"]]
        if "prompt" not in item:
            raise RequestError("a prompt needs 'prompt' or 'prompt_token_ids'", param="prompt")
        return item["prompt"], self.get_tokenizer().encode(item["prompt"])

    def _run(self, work: list[tuple[str | None, list[int], SamplingParams]], *, show: bool) -> list[RequestOutput]:
        results: list[RequestOutput] = []
        assemblers: dict[str, tuple[OutputAssembler, RequestOutput, int]] = {}
        try:
            for text, ids, params in work:
                result = RequestOutput(str(next(self._ids)), text, ids, [CompletionOutput(i) for i in range(params.n)])
                results.append(result)
                for index in range(params.n):
                    key = f"{result.request_id}-{index}"
                    self._submit(key, ids, params, index)
                    assemblers[key] = (
                        OutputAssembler(self._built.tokenizer, params, index=index),
                        result,
                        index,
                    )
            with _Progress(len(assemblers), show=show) as bar:
                while assemblers:
                    bar.finished(self._take(self._core.step(), assemblers))
                    time.sleep(self._core.wait_s() if assemblers else 0.0)
        except BaseException:
            for key in assemblers:
                self._core.cancel(key)
            while self._core.has_work:
                self._core.step()
            raise
        return results

    def _submit(self, key: str, ids: Sequence[int], params: SamplingParams, index: int) -> None:
        sampling = evolve(params, n=1, seed=None if params.seed is None else params.seed + index)
        stop = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop |= self._built.stop_token_ids
        self._core.submit(
            SubmitMsg(
                request_id=key,
                prompt_token_ids=tuple(ids),
                sampling=sampling,
                stop_token_ids=stop,
                arrival=time.monotonic(),
            ),
            bounded=False,
        )

    def _take(self, batch: OutputBatch, live: dict[str, tuple[OutputAssembler, RequestOutput, int]]) -> int:
        """Apply one step's output; returns how many completions ended."""
        ends = {f.request_id: f for f in batch.finished}
        for out in batch.tokens:
            if out.request_id not in live:
                continue
            assembler, result, index = live[out.request_id]
            end = ends.get(out.request_id)
            delta = assembler.tokens(out, None if end is None else end.stop_token_id)
            if delta is not None:
                result.outputs[index].add(delta)
            if assembler.stopped and end is None:
                self._core.cancel(out.request_id, FinishReason.STOP)
        for end in batch.finished:
            if end.request_id not in live:
                continue
            assembler, result, index = live.pop(end.request_id)
            result.outputs[index].add(assembler.finish(end))
            if index == 0:
                result.num_cached_tokens = end.cached_tokens
        return len(ends)

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the model and its memory. Idempotent."""
        self._built.registry.engine_closing(self._core)
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Progress:
    """A bar over completions, shown if there is something to wait for."""

    def __init__(self, total: int, *, show: bool) -> None:
        self._bar: Any = None
        if show:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("generating", total=total)

    def finished(self, count: int) -> None:
        """Count ended completions."""
        if self._bar is not None and count:
            self._bar.advance(self._task, count)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _configure(model: str, config: ServerConfig | None, arguments: Mapping[str, Any]) -> ServerConfig:
    """Keyword arguments over a configuration."""
    from arbi_core.config.load import from_values

    unknown = sorted(set(arguments) - set(ARGUMENTS))
    if unknown:
        raise ConfigError("LLM", f"unknown arguments: {', '.join(unknown)}", f"known: {', '.join(ARGUMENTS)}")
    values = {"model.path": model, **{ARGUMENTS[k]: v for k, v in arguments.items()}}
    return from_values(values, base=config)
