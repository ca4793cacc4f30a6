"""The Jinja tag that chat templates use beside the standard ones."""

from __future__ import annotations

import jinja2.nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

__all__ = ["GenerationTag"]


class GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks assistant text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Return the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
