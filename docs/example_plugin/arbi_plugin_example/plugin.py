"""What the plugin offers. Torch-free: everything heavy is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from arbi_core.api import Route, hookimpl, option
from arbi_plugin_example.attention import FusedBackend
from arbi_plugin_example.family import ExampleFamily

if TYPE_CHECKING:
    import argparse

    from arbi_core.api import AttentionBackend, ModelFamily, RequestRecord

arbi_api_version = 1

finished_requests = 0


@frozen(kw_only=True)
class ExampleConfig:
    """Settings under ``[plugins.example]``."""

    SECTION = "plugins.example"

    greeting: str = option("hello", "What ``arbi greet`` says.")


@hookimpl
def arbi_model_families() -> list[ModelFamily]:
    """Offer the architecture ``ExampleForCausalLM``."""
    return [ExampleFamily()]


@hookimpl
def arbi_attention_backends() -> list[AttentionBackend]:
    """Offer the backend ``paged_kv:example``."""
    return [FusedBackend()]


@hookimpl
def arbi_config_sections() -> dict[str, type]:
    """Offer the settings."""
    return {"example": ExampleConfig}


@hookimpl
def arbi_routes() -> list[Route]:
    """Offer ``GET /example/finished``."""
    return [Route("/example/finished", _finished)]


@hookimpl
def arbi_commands(subparsers: Any) -> None:
    """Offer ``arbi greet``."""
    parser: argparse.ArgumentParser = subparsers.add_parser("greet", help="say hello (from arbi-plugin-example)")
    parser.set_defaults(run=_greet)


@hookimpl
def arbi_request_finished(record: RequestRecord) -> None:
    """Count."""
    global finished_requests  # noqa: PLW0603  # an example; a real plugin would export a metric
    finished_requests += 1
    del record


async def _finished(request: Any) -> Any:
    from starlette.responses import JSONResponse

    del request
    return JSONResponse({"finished": finished_requests})


def _greet(args: argparse.Namespace) -> int:
    del args
    print(ExampleConfig().greeting)  # noqa: T201
    return 0
