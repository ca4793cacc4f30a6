"""What plugins can offer beside backends, families and formats: the smaller protocols. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:
    import torch

    from arbi_core.config.tree import ServerConfig
    from arbi_core.distributed.group import ProcessGroup
    from arbi_core.model.linear import LinearBase
    from arbi_core.sampler.sampler import SamplerRow
    from arbi_core.scheduler.plan import StepOutput, StepPlan

__all__ = [
    "AdapterType",
    "AudioCodec",
    "Drafter",
    "Executor",
    "ExecutorFactory",
    "LogitsProcessor",
    "MediaEncoder",
    "ParsedText",
    "PendingStep",
    "Ranks",
    "ReasoningParser",
    "Route",
    "Runner",
    "StreamParser",
    "ToolCallDelta",
    "ToolParser",
]


@runtime_checkable
class LogitsProcessor(Protocol):
    """Edits the logits of the rows whose `SamplingParams.logits_processors` name it."""

    @property
    def name(self) -> str:
        """Name that requests use."""
        ...

    def apply(self, logits: torch.Tensor, rows: Sequence[SamplerRow]) -> torch.Tensor:
        """Return the edited ``(R, V)`` float32 logits of `rows`; may write in place. Keeps no state of its own."""
        ...


@frozen
class ToolCallDelta:
    """A piece of one tool call.

    Attributes:
        index: which call of the answer, from 0.
        name: function name; set on the first piece of a call only.
        arguments: JSON text to append to the call's arguments.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@frozen
class ParsedText:
    """What a parser made of a piece of text.

    Attributes:
        content: text for the user.
        reasoning: text of the thinking part.
        tool_calls: pieces of tool calls.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class StreamParser(Protocol):
    """State of one answer being parsed. Any split of the text yields the same joined result."""

    def feed(self, text: str) -> ParsedText:
        """Take the next piece; text that may belong to an unfinished marker is held back."""
        ...

    def flush(self) -> ParsedText:
        """The answer is over: give out what was held back."""
        ...


@runtime_checkable
class ReasoningParser(Protocol):
    """Splits thinking from the answer."""

    @property
    def name(self) -> str:
        """Name that configuration uses."""
        ...

    def detect(self, template: str) -> bool:
        """Whether a chat template belongs to a model that thinks in this format."""
        ...

    def start(self, rendered_prompt: str) -> StreamParser:
        """Begin an answer; the prompt tells whether it opens inside the thinking part."""
        ...


@runtime_checkable
class ToolParser(Protocol):
    """Finds tool calls in the answer."""

    @property
    def name(self) -> str:
        """Name that configuration uses."""
        ...

    def detect(self, template: str) -> bool:
        """Whether a chat template belongs to a model that calls tools in this format."""
        ...

    def start(self) -> StreamParser:
        """Begin an answer."""
        ...


@runtime_checkable
class AdapterType(Protocol):
    """A kind of adapter (LoRA, ...) that corrects linears per request."""

    @property
    def name(self) -> str:
        """Short name."""
        ...

    def detect(self, config: Mapping[str, Any]) -> bool:
        """Whether an adapter's config file is of this type."""
        ...

    def load(self, path: str, layers: Mapping[str, LinearBase]) -> Any:
        """Read an adapter and check it against the model's linears, by adapter key."""
        ...

    def batch_state(self, adapters: Sequence[Any | None], cu_seqlens_q: Sequence[int]) -> Any:
        """Make the state of one step: the adapter of every row."""
        ...

    def correct(self, layer: LinearBase, x: torch.Tensor, y: torch.Tensor, state: Any) -> torch.Tensor:
        """Return the corrected output of a linear; called before any collective."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens that the model then verifies in one step."""

    @property
    def name(self) -> str:
        """Name that configuration uses."""
        ...

    def propose(self, hidden: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        """From ``(R, hidden)`` and ``(R,)`` last tokens return ``(R, count)`` proposals on the device."""
        ...


@runtime_checkable
class MediaEncoder(Protocol):
    """Turns images or audio into embeddings that take the place of prompt tokens."""

    @property
    def name(self) -> str:
        """Short name."""
        ...

    @property
    def media_types(self) -> tuple[str, ...]:
        """MIME type prefixes it reads, e.g. ``image/``."""
        ...

    def encode(self, data: bytes, media_type: str) -> torch.Tensor:
        """Return ``(tokens, hidden)`` embeddings."""
        ...


@runtime_checkable
class AudioCodec(Protocol):
    """Turns codec tokens into sound and back."""

    @property
    def name(self) -> str:
        """Short name."""
        ...

    @property
    def sample_rate(self) -> int:
        """Samples per second."""
        ...

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """``(frames, codebooks)`` codes to ``(samples,)`` float32 in [-1, 1]."""
        ...


class PendingStep(Protocol):
    """A step that the ranks have been given."""

    def result(self) -> StepOutput:
        """Wait for what it drew. Called once, in the order of dispatch."""
        ...


class Executor(Protocol):
    """Whatever carries out plans on the ranks."""

    @property
    def failure(self) -> str | None:
        """Why no plan can be carried out any more; None while all is well."""
        ...

    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Give every rank one step."""
        ...

    def close(self) -> None:
        """Release device memory and end other ranks. Idempotent."""
        ...


class Runner(Protocol):
    """One rank's model and state."""

    @property
    def failure(self) -> str | None:
        """As `Executor.failure`: on one rank the runner is the executor."""
        ...

    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Give the device one step."""
        ...

    def close(self) -> None:
        """Release device memory. Idempotent."""
        ...


class Ranks(Protocol):
    """This process's place among the ranks that serve one model."""

    @property
    def group(self) -> ProcessGroup:
        """What parallel layers talk to."""
        ...

    @property
    def rank(self) -> int:
        """0 drives, the others follow."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def device_index(self) -> int:
        """Which CUDA device of its host is this rank's."""
        ...

    def agree_min(self, value: int) -> int:
        """The smallest of all ranks' values. Every rank calls it, in the same order."""
        ...

    def drive(self, runner: Runner) -> Executor:
        """Rank 0: what hands plans to all ranks, this one included."""
        ...

    def follow(self, runner: Runner) -> None:
        """Other ranks: carry out plans until rank 0 closes. Raises if rank 0 is lost."""
        ...

    def close(self) -> None:
        """Leave the group. Idempotent."""
        ...


@runtime_checkable
class ExecutorFactory(Protocol):
    """A way to start the ranks and reach them."""

    @property
    def name(self) -> str:
        """Name that ``executor`` in the configuration uses."""
        ...

    def open(self, config: ServerConfig) -> Ranks:
        """Start or join the ranks; returns this process's place among them."""
        ...


@frozen
class Route:
    """An HTTP route.

    Attributes:
        path: starlette path.
        endpoint: starlette endpoint, ``async (request) -> Response``; ``request.app.state.engine`` is the engine.
        methods: HTTP methods.
        auth: ``public``, ``user`` or ``admin``.
    """

    path: str
    endpoint: Any
    methods: tuple[str, ...] = ("GET",)
    auth: str = "user"
