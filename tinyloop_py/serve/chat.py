"""Messages to token ids: the model's chat template in a sandbox, and text that cannot pose as the template's own."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ServeError, bad_request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = Mapping[str, Any]


class Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training, as Huginn's template does; its content stands as it is."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own attribute

    def parse(self, parser: Parser) -> nodes.Node:
        """The content in a scope of its own, as transformers has it."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatFormat:
    """Renders conversations of one model.

    Special tokens that stand in a message's text (such as an end of turn) are encoded as plain text: only the template can
    end a turn. A mark, drawn anew for each conversation, is put into them before rendering and taken out before encoding.

    Parameters
    ----------
    template
        Jinja, as models carry it.
    stop_ids
        The first of them is what the template knows as eos_token.
    """

    def __init__(self, template: str, tokenizer: Tokenizer, stop_ids: Sequence[int] = ()) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise ValueError(f"the model's chat template cannot be read: {error}") from None
        self._tokenizer = tokenizer
        start = tokenizer.encode("").ids[:1]
        self._bos = tokenizer.id_to_token(start[0]) if start else ""
        self._eos = tokenizer.id_to_token(stop_ids[0]) or "" if stop_ids else ""
        special = (token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
        self._special = sorted({text for text in special if len(text) > 1}, key=len, reverse=True)

    def encode(self, messages: Sequence[Message], *, reply: bool = True) -> list[int]:
        """Token ids of a conversation; with `reply` up to where the model's answer begins.

        Raises ServeError(400) where the template refuses the messages.
        """
        mark = f"\ufdd0{secrets.token_hex(8)}\ufdd1"
        marked = [{**message, "content": self._defuse(message.get("content"), mark)} for message in messages]
        try:
            text = self._template.render(messages=marked, add_generation_prompt=reply, bos_token=self._bos, eos_token=self._eos, tools=None)
        except SecurityError as error:
            raise ServeError(500, f"The model's chat template does what a template may not: {error}", code="chat_template") from None
        except Exception as error:  # whatever a template does with what it was given
            raise bad_request(f"The model's chat template refuses these messages: {error}", "messages", "chat_template") from None
        encoded = self._tokenizer.encode_batch(text.split(mark), add_special_tokens=False)  # a batch leaves the interpreter's lock to others
        return [token for part in encoded for token in part.ids]

    def _defuse(self, content: Any, mark: str) -> Any:
        if not isinstance(content, str):
            return content
        for special in self._special:
            content = content.replace(special, special[0] + mark + special[1:])
        return content


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)
