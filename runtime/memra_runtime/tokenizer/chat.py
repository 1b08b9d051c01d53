"""Render chat templates, which come with the weights and are not trusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from memra_runtime.errors import fail


class _Generation(Extension):
    """`{% generation %}` marks a reply for training; here it only renders what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, object],
    place: str,
) -> str:
    """Render a template as transformers does, in a sandbox.

    Source: transformers, `utils/chat_template_utils.py` (_compile_jinja_template).
    Raises: MemraError if the template is wrong or refuses the messages.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., object]] = {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    environment.globals.update(helpers)
    try:
        compiled = environment.from_string(template)
        return compiled.render(messages=[dict(message) for message in messages], **variables)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        fail(
            "chat-template",
            f"the model's chat template failed{where}: {error.message}",
            place,
            hints=("check the roles and their order, or give a plain prompt without `--chat`",),
        )
    except Exception as error:  # a template is a program of its own; it can raise anything
        fail(
            "chat-template",
            f"the model's chat template failed: {type(error).__name__}: {error}",
            place,
        )
