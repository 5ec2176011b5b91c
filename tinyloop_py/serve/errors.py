"""What a server answers when it cannot do what was asked: one exception, in the shape of the API."""

from __future__ import annotations

import math
from typing import Any

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ServeError(Exception):
    """An answer other than success.

    Parameters
    ----------
    status
        HTTP status.
    message
        What was got, what was expected, what to do.
    code, param
        The error's name and the field that it is about, as OpenAI's API has them.
    retry_after
        Seconds after which trying again makes sense.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        headers = {} if self.retry_after is None else {"retry-after": str(max(1, math.ceil(self.retry_after)))}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ServeError:
    """Status 400."""
    return ServeError(400, message, param=param, code=code)


def context_exceeded(n_prompt: int, max_tokens: int, limit: int) -> ServeError:
    """The prompt, or it and what is to be drawn, is longer than the context."""
    asked = f"{n_prompt} in the prompt" + (f" and {max_tokens} to generate" if max_tokens else "")
    text = f"This model's maximum context length is {limit} tokens; the request has {asked}. Shorten the prompt or ask for fewer tokens."
    return bad_request(text, "messages", "context_length_exceeded")


def internal_error() -> ServeError:
    """A fault of the server's own."""
    return ServeError(500, "The server failed; its log has the reason.", code="internal_error")


def engine_down(reason: str = "the worker that runs the model has died; restart the server") -> ServeError:
    """Nothing can run."""
    return ServeError(503, reason, code="engine_down")


def shutting_down() -> ServeError:
    """The end is near."""
    return ServeError(503, "the server is shutting down", code="shutting_down", retry_after=5)


def deadline_exceeded(seconds: float) -> ServeError:
    """It took too long."""
    return ServeError(504, f"The request was not done within its deadline of {seconds:g} s.", code="deadline_exceeded")
