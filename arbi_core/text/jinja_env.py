"""The Jinja that chat templates are written for, as transformers defines it, within bounds. Torch-free.

Templates come with checkpoints and with requests, so they are foreign code. The sandbox keeps them away from Python;
here, time and size are bounded as well: every loop turn and every call looks at the clock of the rendering, and what
repeats, pads or joins text is refused once the result would be longer than a prompt can be.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from attrs import frozen
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import do_join
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from arbi_core.errors import RequestError

__all__ = ["MAX_CHARACTERS", "ChatTemplate", "compile_template", "render"]

MAX_CHARACTERS = 16 << 20
"""Longest prompt, and longest text on the way to it."""
MAX_SECONDS = 10.0
"""Longest rendering. Ordinary ones take milliseconds."""

_deadline: ContextVar[float] = ContextVar("arbi_template_deadline")


@frozen
class ChatTemplate:
    """A compiled template.

    Attributes:
        code: renders.
        reads_parts: it loops over a message's content, so it knows content that is a list of parts.
        reads_text: it asks whether something is a string, so it knows content that is a text although it knows parts.
        knows_developer: it mentions the role ``developer``.
    """

    code: jinja2.Template
    reads_parts: bool
    reads_text: bool
    knows_developer: bool


@lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """Compile a template. Raises `jinja2.TemplateSyntaxError`."""
    environment = _environment()
    try:
        tree = Parser(environment, source).parse()
        code = environment.from_string(source)
    except (MemoryError, RecursionError, SyntaxError) as exc:  # Python's own limits on nesting
        raise jinja2.TemplateSyntaxError(f"it cannot be compiled: {exc}", 1) from exc
    return ChatTemplate(
        code=code,
        reads_parts=_loops_over_content(tree),
        reads_text=any(test.name == "string" for test in tree.find_all(nodes.Test)),
        knows_developer="developer" in source,
    )


def render(template: ChatTemplate, variables: dict[str, Any]) -> str:
    """Render within the bounds.

    Raises:
        RequestError: the template refuses by ``raise_exception``, takes too long or writes too much.
        Exception: whatever else goes wrong inside the template.
    """
    token = _deadline.set(time.monotonic() + MAX_SECONDS)
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.code.generate(**variables):
            size += len(piece)
            _check_size(size)
            _check_time()
            pieces.append(piece)
    finally:
        _deadline.reset(token)
    return "".join(pieces)


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether there is a loop over ``x.content``, or over a name that was set from it."""

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"

    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and is_content(assign.node)
    }
    return any(
        is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in names)
        for loop in tree.find_all(nodes.For)
    )


# -- what templates call ----------------------------------------------------------------------------------------------


def _tojson(  # the signature that transformers gives it
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise RequestError(f"the chat template refuses these messages: {message}", param="messages")


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks assistant text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


# -- bounds -----------------------------------------------------------------------------------------------------------

_BOUNDED = "arbi_bounded"
_JOINED = "arbi_joined"
_WIDE_FORMAT = re.compile(r"\d{7}|%[-+ #0]*\*")
"""A field width of millions, or one that is an argument."""


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise RequestError(f"the chat template takes more than {MAX_SECONDS:g} seconds", param="messages")


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise RequestError(f"the chat template makes a text of more than {MAX_CHARACTERS} characters", param="messages")


def _bounded(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time()
        yield item


def _joined(parts: Iterable[Any], separator: str = "") -> str:
    texts = [str(p) for p in parts]
    _check_size(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _check_width(*values: Any) -> None:
    _check_size(max((abs(v) for v in values if isinstance(v, int)), default=0))


def _check_replacement(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        _check_size(len(text) + text.count(old) * len(new))


def _check_format(text: Any, *_: Any) -> None:
    if isinstance(text, str) and _WIDE_FORMAT.search(text):
        _check_size(MAX_CHARACTERS + 1)


_CHECKS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "expandtabs", "indent", "ljust", "rjust", "wordwrap", "zfill"), _check_width),
    "format": _check_format,
    "format_map": _check_format,
    "replace": _check_replacement,
}
"""Looks at the arguments of filters and text methods that can make much of little."""


def _checked(check: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    wants_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)  # also carries Jinja's mark that the filter wants its context first
    def run(*args: Any, **kwargs: Any) -> Any:
        check(*args[wants_context:], *kwargs.values())
        return function(*args, **kwargs)

    return run


@jinja2.pass_eval_context
def _join(context: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """The built-in filter ``join`` over what has been measured."""
    items = list(_bounded(value))
    if attribute is None:
        _check_size(sum(len(str(i)) for i in items) + len(str(d)) * len(items))
    return str(do_join(context, items, d, attribute))


class _Environment(ImmutableSandboxedEnvironment):
    """Holds loop turns and calls against the clock, and sizes against the longest prompt."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _rewrite(tree)
        tree.set_environment(self)
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # the sandbox wraps str.format
        if isinstance(owner, str):
            name = obj.__name__
            if name == "join" and args:
                return _joined(args[0], owner)
            if name in _CHECKS:
                _CHECKS[name](owner, *args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * abs(right))
        elif operator == "*":
            for many, count in ((left, right), (right, left)):
                if isinstance(many, (str, list, tuple)) and isinstance(count, int):
                    _check_size(len(many) * count)
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, type(left)):
            _check_size(len(left) + len(right))
        elif operator == "%":
            _check_format(left)
        return super().call_binop(context, operator, left, right)


def _rewrite(node: nodes.Node) -> None:
    """Send what loops run over through `_bounded`, and ``a ~ b`` through `_joined`."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_rewritten(v) if isinstance(v, nodes.Node) else v for v in value])
        elif isinstance(value, nodes.Node):
            setattr(node, field, _rewritten(value))
    if isinstance(node, nodes.For):
        node.iter = _filter(node.iter, _BOUNDED)


def _rewritten(node: nodes.Node) -> nodes.Node:
    _rewrite(node)
    if isinstance(node, nodes.Concat):
        return _filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), _JOINED)
    return node


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # prompts are no HTML
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    for name, check in _CHECKS.items():
        if name in environment.filters:
            environment.filters[name] = _checked(check, environment.filters[name])
    environment.filters.update({"join": _join, "tojson": _tojson, _BOUNDED: _bounded, _JOINED: _joined})
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment
