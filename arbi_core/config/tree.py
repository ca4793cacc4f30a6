"""The configuration tree: every setting, its default, its meaning and its range, written once. Torch-free.

Each field's ``metadata["help"]`` is its help text on the command line and in the documentation; validators raise
`ConfigError` with the field's dotted name.
"""

from __future__ import annotations

import math
from typing import Any

from attrs import Attribute, field, frozen

from arbi_core.errors import ConfigError

__all__ = [
    "CacheConfig",
    "HttpConfig",
    "ModelConfig",
    "PluginsConfig",
    "SchedulerConfig",
    "ServerConfig",
    "option",
]


def option(
    default: Any,
    help: str,  # noqa: A002  # it is the help text
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    flag: str | None = None,
    metavar: str | None = None,
) -> Any:
    """Declare one setting.

    Args:
        default: value when nothing sets it; None means "decided at boot".
        help: one sentence for people.
        low: least allowed number.
        high: greatest allowed number.
        choices: allowed strings.
        flag: command-line name where it differs from the field name with dashes.
        metavar: how help texts name the value.
    """

    def check(owner: Any, attribute: Attribute[Any], value: Any) -> None:
        name = f"{getattr(type(owner), 'SECTION', '')}.{attribute.name}".lstrip(".")
        if value is None:
            return
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(name, f"{value!r} is no usable number", "a finite one")
        if choices and value not in choices:
            raise ConfigError(name, f"{value!r} is not one of the choices", "one of: " + ", ".join(choices))
        if low is not None and value < low:
            raise ConfigError(name, f"{value!r} is too small", f"at least {low:g}")
        if high is not None and value > high:
            raise ConfigError(name, f"{value!r} is too large", f"at most {high:g}")

    return field(
        default=default,
        validator=check,
        metadata={"help": help, "choices": choices, "flag": flag, "metavar": metavar},
    )


@frozen(kw_only=True)
class ModelConfig:
    """Which model, and in what form."""

    SECTION = "model"

    path: str = option("demo", "Model directory, .gguf file, hub id, or 'demo' (SmolLM2-135M-Instruct).", flag="model")
    tokenizer: str | None = option(None, "Take the tokenizer from this directory or file instead of the model.")
    dtype: str = option(
        "auto",
        "Dtype of activations; auto is float32 on CPU and the checkpoint's on CUDA.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = option(
        "auto", "auto reads the checkpoint; dummy makes seeded random weights.", choices=("auto", "dummy")
    )
    max_model_len: int | None = option(
        None, "Longest context in tokens; default: what the model was trained for.", low=1
    )
    device: str = option("auto", "cpu, cuda, cuda:N; auto takes CUDA where there is one.")
    enforce_eager: bool = option(False, "Launch every kernel of a decode step instead of replaying CUDA graphs.")
    seed: int = option(0, "Seed of dummy weights and of requests that bring none.")
    skip_tokenizer_init: bool = option(False, "Serve token ids only; no text in or out.")


@frozen(kw_only=True)
class CacheConfig:
    """Pages, their dtype and the prefix cache."""

    SECTION = "cache"

    kv_dtype: str = option(
        "auto",
        "How keys and values are stored; auto is the model's dtype. Plugins add names.",
        flag="kv-cache-dtype",
    )
    page_size: int = option(16, "Tokens per page.", low=1, high=1024)
    num_pages: int | None = option(None, "Pages in the pool; default: what the memory setting allows.", low=2)
    gpu_memory_utilization: float = option(0.9, "Share of the GPU's memory that arbi may use.", low=0.05, high=1.0)
    cpu_kv_gib: float = option(2.0, "Most memory for the KV pool on CPU, in GiB.", low=0.001)
    enable_prefix_caching: bool = option(True, "Reuse the pages of shared prompt prefixes.")
    host_tier_gib: float = option(
        0.0, "RAM for pages that left the device, in GiB; they come back on a prefix hit. 0 keeps none.", low=0.0
    )
    disk_tier_dir: str | None = option(None, "Directory for pages that left the RAM tier; needs --host-tier-gib.")
    disk_tier_gib: float = option(16.0, "Most space that --disk-tier-dir may take, in GiB.", low=0.001)
    disk_tier_encrypt: bool = option(
        False, "Encrypt the disk tier's files (AES-256-GCM, a key that lives in this process only)."
    )
    tier_ttl_s: float | None = option(None, "Forget pages of the tiers unused for so many seconds.", low=1.0)
    tier_min_tokens: int = option(64, "Shorter prefixes are computed again instead of kept in RAM.", low=0)
    disk_tier_min_tokens: int = option(512, "Shorter prefixes are computed again instead of kept on disk.", low=0)
    savepoint_gib: float = option(
        1.0, "RAM for saved recurrent states, which prefix hits of hybrid models need, in GiB; 0 keeps none.", low=0.0
    )
    backends: tuple[str, ...] = option(
        (), "Choose an attention backend, kind:name (repeatable).", flag="backend", metavar="KIND:NAME"
    )


@frozen(kw_only=True)
class SchedulerConfig:
    """Who runs in a step."""

    SECTION = "scheduler"

    max_num_seqs: int = option(256, "Most requests in one step.", low=1, high=65536)
    max_num_batched_tokens: int = option(2048, "Most tokens in one step.", low=1)
    max_prefill_chunk: int | None = option(
        None, "Most prompt tokens of one request in one step; default: the token budget.", low=1
    )
    batch_prefill_share: float = option(
        0.25, "Share of the prompt tokens of a step for batch work while interactive requests run.", low=0.0, high=1.0
    )
    tensor_parallel_size: int = option(1, "Ranks that share every layer.", low=1, high=1024, flag="tp")
    executor: str = option(
        "auto", "How ranks are started and reached: auto (local for one rank, else distributed), or a name."
    )
    rank_timeout_s: float = option(60.0, "Seconds after which a rank that does not finish a step is lost.", low=0.1)
    async_output: str = option(
        "auto",
        "Decide a step before the tokens of the previous one are known; auto is on for CUDA.",
        choices=("auto", "on", "off"),
    )
    tenant_limits: tuple[str, ...] = option(
        (),
        "Limits of a tenant, or of all others with the name * (repeatable): weight, max_running, max_waiting, "
        "max_prompt_tokens, tokens_per_second, priority.",
        metavar="NAME:KEY=VALUE[:KEY=VALUE]",
    )
    jobs_dir: str | None = option(
        None, "Directory where batch jobs that were not finished wait for a restart (requests with a job_id)."
    )
    max_queue: int = option(1024, "Requests that may wait; more are answered 429.", low=1)
    default_timeout_s: float | None = option(None, "Seconds after which a request ends with 'timeout'.", low=0.001)


@frozen(kw_only=True)
class HttpConfig:
    """The HTTP side."""

    SECTION = "server"

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    served_model_name: str | None = option(None, "Name that clients use; default: the model path's last part.")
    reasoning_parser: str = option(
        "auto", "How thinking is split from the answer: auto (by the chat template), none, or a parser's name."
    )
    max_body_mib: float = option(4.0, "Largest request body in MiB.", low=0.001)
    drain_timeout_s: float = option(30.0, "Seconds that running requests get to finish at shutdown.", low=0.0)
    log_level: str = option("info", "Log level.", choices=("debug", "info", "warning", "error"))


@frozen(kw_only=True)
class PluginsConfig:
    """Discovery of plugins."""

    SECTION = "plugins_policy"

    only: tuple[str, ...] | None = option(
        None,
        "Load only these plugins (entry-point names) beside the core's own.",
        flag="plugins",
        metavar="NAME[,NAME]",
    )
    strict: bool = option(False, "Refuse to boot when a plugin is broken.", flag="strict-plugins")
    prefer: tuple[str, ...] = option(
        (),
        "Which distribution wins a key that two plugins offer: key=distribution.",
        flag="prefer-plugin",
        metavar="KEY=DIST",
    )


@frozen(kw_only=True)
class ServerConfig:
    """The whole tree. ``plugins`` holds one section per plugin that declares one."""

    model: ModelConfig = field(factory=ModelConfig)
    cache: CacheConfig = field(factory=CacheConfig)
    scheduler: SchedulerConfig = field(factory=SchedulerConfig)
    server: HttpConfig = field(factory=HttpConfig)
    plugins_policy: PluginsConfig = field(factory=PluginsConfig)
    plugins: dict[str, Any] = field(factory=dict)
