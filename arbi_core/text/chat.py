"""Chat templates: messages to the text that the model was trained on. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arbi_core.errors import CheckpointError, RequestError
from arbi_core.text.messages import normalize_messages

if TYPE_CHECKING:
    from arbi_core.text.jinja_env import ChatTemplate
    from arbi_core.text.tokenizer import Tokenizer

__all__ = ["encode_chat", "normalize_messages", "render_chat"]

OWN_VARIABLES = frozenset({"add_generation_prompt", "documents", "messages", "tools"})
"""Variables that have arguments of their own."""


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Render and encode; see `render_chat`. The template writes the begin token itself, so none is added."""
    text = render_chat(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        documents=documents,
        template=template,
        variables=variables,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render messages with the checkpoint's chat template.

    What the template can read decides the form that it gets: content that is a list of text parts stays one for a
    template that loops over a message's content and becomes one text for any other; content that is a text becomes a
    list with one part for a template that only knows lists. The role ``developer`` is written as ``system`` for a
    template that does not mention it.

    Args:
        tokenizer: brings the templates and the named tokens.
        messages: OpenAI-style messages.
        add_generation_prompt: end with the header of the assistant's turn.
        tools: tool descriptions for templates that take them.
        documents: documents for templates that take them.
        template: Jinja source to use instead of the checkpoint's.
        variables: further template variables (``enable_thinking``, ...); they win over the named tokens.

    Raises:
        RequestError: no template, bad messages, a `template` that is not valid Jinja, or the template refuses the
            messages, fails on them, takes too long or writes too much.
        CheckpointError: the checkpoint's template is not valid Jinja.
    """
    from arbi_core.text import jinja_env

    own = OWN_VARIABLES & set(variables or {})
    if own:
        raise RequestError(
            f"{', '.join(sorted(own))} cannot be set as template variables", param="chat_template_kwargs"
        )
    compiled = _given(template) if template is not None else _chosen(tokenizer, with_tools=bool(tools))
    everything = {
        **tokenizer.named_tokens,
        **(variables or {}),
        "messages": _for_template(compiled, messages),
        "tools": list(tools) if tools else None,
        "documents": list(documents) if documents else None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return jinja_env.render(compiled, everything)
    except RequestError:
        raise
    except RecursionError:
        raise RequestError("the chat template calls itself without end", param="messages") from None
    except Exception as exc:  # a template can raise anything; all of it concerns this request alone
        problem = str(exc) or type(exc).__name__
        raise RequestError(f"the chat template fails on these messages: {problem}", param="messages") from exc


def _for_template(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    plain = normalize_messages(
        messages, keep_parts=template.reads_parts, wrap_text=template.reads_parts and not template.reads_text
    )
    if not template.knows_developer:
        for message in plain:
            if message["role"] == "developer":
                message["role"] = "system"
    return plain


def _given(source: str) -> ChatTemplate:
    import jinja2

    from arbi_core.text.jinja_env import compile_template

    try:
        return compile_template(source)
    except jinja2.TemplateSyntaxError as exc:
        raise RequestError(
            f"chat_template is not valid Jinja: line {exc.lineno}: {exc.message}", param="chat_template"
        ) from exc


def _chosen(tokenizer: Tokenizer, *, with_tools: bool) -> ChatTemplate:
    """The checkpoint's template: ``tool_use`` where there are tools and such a template, else ``default``."""
    import jinja2

    from arbi_core.text.jinja_env import compile_template

    name = "tool_use" if with_tools and "tool_use" in tokenizer.chat_templates else "default"
    if name not in tokenizer.chat_templates:
        raise _no_template(tokenizer.chat_template_names)
    try:
        return compile_template(tokenizer.chat_templates[name])
    except jinja2.TemplateSyntaxError as exc:
        raise CheckpointError(
            f"the checkpoint's chat template {name!r} is not valid Jinja: line {exc.lineno}: {exc.message}"
        ) from exc


def _no_template(others: Sequence[str]) -> RequestError:
    if others:
        problem = f"this model has no default chat template, only {', '.join(others)}"
        return RequestError(f"{problem}; send the one you mean as chat_template", param="chat_template")
    problem = "this model has no chat template, so it cannot take messages"
    return RequestError(f"{problem}; use the completions endpoint with a prompt", param="messages")
