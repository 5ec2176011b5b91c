"""From generation requests to an answer: counted for the tenant, streamed or whole, ended when the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from .access import note
from .beside import beside
from .errors import ServeError
from .event_parts import EventParts
from .event_stream import DONE, ClientGone, EventStream, event, gone_of, unless_gone
from .requests import GenerationRequest, Output, Piece, Stream
from .responses import Shape, usage_of
from .service import Service
from .tenants import Tenant

MOST_PIECES = 64  # that are written down without a look at anybody else


class Answer:
    """The streams of one HTTP request: one for each of its prompts.

    Parameters
    ----------
    echoes
        Texts that stand before the outputs of each prompt ("" for none).
    """

    def __init__(self, service: Service, tenant: Tenant, request: Request, shape: Shape, echoes: Sequence[str] = ()) -> None:
        self._service = service
        self._tenant = tenant
        self._request = request
        self._shape = shape
        self._echoes = echoes
        self._streams: list[Stream] = []
        self._n_begun = 0
        self._begin = time.perf_counter()
        self._first_at: float | None = None
        self._reasons: list[str] = []
        self._ended = False

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Hand all of them to the engine, or none."""
        engine, _ = self._service.ready()
        self._tenant.begin(len(requests))
        self._n_begun = len(requests)
        try:
            for request in requests:
                self._streams.append(engine.submit(request))
        except BaseException:
            self._end()
            raise

    async def respond(self, stream: bool, with_usage: bool) -> Response:
        """The answer."""
        try:
            return self._streamed(with_usage) if stream else await self._whole()
        except ClientGone:
            self._end()
            return Response(status_code=499)
        except BaseException:
            self._end()
            raise

    # ---- whole

    async def _whole(self) -> Response:
        outputs = await unless_gone(self._request, self._collect())
        self._end()
        return await beside(self._shape.n_parts(outputs), lambda: JSONResponse(self._shape.whole(outputs, self._streams)))

    async def _collect(self) -> list[Output]:
        outputs = [Output(text=self._echo(index)) for index in range(sum(s.request.n for s in self._streams))]
        async for pieces in self._pieces():
            for index, piece in pieces:
                outputs[index].add(piece)
        return outputs

    # ---- streamed

    def _streamed(self, with_usage: bool) -> Response:
        gone_of(self._request).add_done_callback(self._end)  # and with the streams their events
        return EventStream(self._events(with_usage))

    async def _events(self, with_usage: bool) -> AsyncGenerator[bytes, None]:
        """The events of what has come, at a time; nothing after the client has left."""
        parts, last = EventParts(self._shape, with_usage, self._echo), b""
        try:
            async for pieces in self._pieces():
                events = parts.of(pieces)
                if all(stream.ended for stream in self._streams):  # they go with the end, in one write
                    last += events
                elif events:
                    yield events
            if not gone_of(self._request).done():
                tail = event(self._shape.chunk([], True, usage_of(self._streams))) if with_usage else b""
                yield last + tail + DONE
        finally:
            self._end()

    # ---- both

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._streams[0].request.n] if self._echoes else ""

    async def _pieces(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """(index of the choice, piece) of all streams, as they come: those that are there together."""
        if len(self._streams) == 1:
            while pieces := await self._streams[0].take(MOST_PIECES):
                yield self._seen(0, pieces)
            return
        merged: asyncio.Queue[tuple[int, list[Piece]] | BaseException | None] = asyncio.Queue()

        async def pump(number: int, stream: Stream) -> None:
            try:
                while pieces := await stream.take(MOST_PIECES):
                    merged.put_nowait((number, pieces))
                merged.put_nowait(None)
            except ServeError as error:
                merged.put_nowait(error)

        pumps = [asyncio.ensure_future(pump(number, stream)) for number, stream in enumerate(self._streams)]
        try:
            n_left = len(pumps)
            while n_left:
                item = await merged.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    n_left -= 1
                else:
                    yield self._seen(*item)
        finally:
            for task in pumps:
                task.cancel()

    def _seen(self, number: int, pieces: list[Piece]) -> list[tuple[int, Piece]]:
        """Pieces of a prompt's stream by the choices that they belong to, once they are written down."""
        if self._first_at is None:
            self._first_at = time.perf_counter()
            self._service.metrics.first_token.observe(self._first_at - self._begin)
        self._reasons += [piece.finish_reason for piece in pieces if piece.finish_reason is not None]
        first = number * self._streams[number].request.n
        return [(first + piece.index, piece) for piece in pieces]

    def _end(self, _gone: asyncio.Future[None] | None = None) -> None:
        """Cancels what still runs and writes down what was used; once."""
        if self._ended:
            return
        self._ended = True
        gone_of(self._request).remove_done_callback(self._end)  # else each would hold the other, and the request's body
        cancelled = gone_of(self._request).done() and any(not stream.ended for stream in self._streams)
        for stream in self._streams:
            stream.cancel()
        metrics, usage = self._service.metrics, usage_of(self._streams)
        used = usage_of([stream for stream in self._streams if stream.began])  # who leaves before the first token has had a prompt run
        cached = used["prompt_tokens_details"]["cached_tokens"]
        metrics.prompt_tokens.inc(used["prompt_tokens"])
        metrics.cached_tokens.inc(cached)
        metrics.generated_tokens.inc(used["completion_tokens"])
        metrics.duration.observe(time.perf_counter() - self._begin)
        if cancelled:
            metrics.cancelled.inc()
        self._tenant.end(self._n_begun, used["total_tokens"])
        fields: dict[str, Any] = {
            "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached, "completion_tokens": usage["completion_tokens"],
            "finish": self._reasons, "cancelled": cancelled,
        }  # fmt: skip
        if self._first_at is not None:
            fields["first_token_ms"] = round(1e3 * (self._first_at - self._begin), 1)
        note(self._request, **fields)
