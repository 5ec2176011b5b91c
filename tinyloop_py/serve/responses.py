"""What is answered: OpenAI's objects, as plain dicts for speed, and as models for the API's description."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from ..token_logprobs import TokenLogprobs
from .event_stream import encode, event
from .requests import Output, Stream
from .token_text import TokenText


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Of the output's tokens."""

    reasoning_tokens: int


class Usage(BaseModel):
    """What a request used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChatReply(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatReply
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(BaseModel):
    """The continuations of prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


def usage_of(streams: Sequence[Stream]) -> dict[str, Any]:
    """What some requests used so far."""
    n_prompt, n_generated = sum(s.n_prompt for s in streams), sum(s.n_generated for s in streams)
    return {
        "prompt_tokens": n_prompt, "completion_tokens": n_generated, "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": sum(s.n_cached for s in streams)}, "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip


class Shape(ABC):
    """The frame of one answer: its id, time and model, around choices of its kind."""

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, model: str, fingerprint: str, tokens: TokenText, n_top: int | None) -> None:
        self.id = self.prefix + uuid.uuid4().hex
        self._frame = {"id": self.id, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._around: tuple[bytes, bytes] | None = None  # what stands before and after a choice in an event
        self._tokens = tokens
        self._n_top = n_top

    def whole(self, outputs: Sequence[Output], streams: Sequence[Stream]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        return {**self._frame, "object": self.kind, "choices": choices, "usage": usage_of(streams)}

    def n_parts(self, outputs: Sequence[Output]) -> int:
        """How much is to be done for them: log-probabilities are what takes long."""
        return sum(len(output.logprobs) for output in outputs) * (1 + (self._n_top or 0))

    def chunk(self, choices: list[dict[str, Any]], with_usage: bool, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """A part of a streamed answer; one with usage says null until the end."""
        body = {**self._frame, "object": self.chunk_kind, "choices": choices}
        return {**body, "usage": usage} if with_usage else body

    def events(self, choices: list[dict[str, Any]], with_usage: bool) -> bytes:
        """A chunk for each choice, as events: the frame, which is the same for all, is encoded once."""
        if self._around is None:
            head, tail = event(self.chunk([], with_usage)).split(b'"choices":[]')  # in a model's name the quotes would be escaped
            self._around = head + b'"choices":[', b"]" + tail
        head, tail = self._around
        return b"".join([head + encode(choice) + tail for choice in choices])

    @abstractmethod
    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """A whole output."""

    @abstractmethod
    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], finish_reason: str | None, offset: int) -> dict[str, Any]:
        """A part of an output; `offset` characters of it come before its token."""


class ChatShape(Shape):
    """Chat completions."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """A message."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(output.logprobs), "finish_reason": output.finish_reason}

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], finish_reason: str | None, offset: int) -> dict[str, Any]:
        """A part of a message."""
        return {"index": index, "delta": {"content": text} if text else {}, "logprobs": self._logprobs(logprobs), "finish_reason": finish_reason}

    def opening(self, index: int) -> dict[str, Any]:
        """The part that names the role."""
        return {"index": index, "delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None, "finish_reason": None}

    def _logprobs(self, listed: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._n_top is None:
            return None
        content = [{**self._one(item.token, item.logprob), "top_logprobs": [self._one(*pair) for pair in item.top]} for item in listed]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._tokens.text(token), "logprob": max(logprob, -9999.0), "bytes": self._tokens.bytes(token)}


class TextShape(Shape):
    """Plain completions."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """A text."""
        return {
            "index": index,
            "text": output.text,
            "logprobs": self._logprobs(output.logprobs, output.offsets),
            "finish_reason": output.finish_reason,
        }

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], finish_reason: str | None, offset: int) -> dict[str, Any]:
        """A part of a text."""
        return {"index": index, "text": text, "logprobs": self._logprobs(logprobs, [offset] * len(logprobs)), "finish_reason": finish_reason}

    def _logprobs(self, listed: Sequence[TokenLogprobs], offsets: list[int]) -> dict[str, Any] | None:
        if self._n_top is None:
            return None
        texts = [self._tokens.text(item.token) for item in listed]
        top = [{self._tokens.text(token): max(value, -9999.0) for token, value in (*item.top, (item.token, item.logprob))} for item in listed]
        return {"tokens": texts, "token_logprobs": [max(item.logprob, -9999.0) for item in listed], "top_logprobs": top, "text_offset": offsets}
