"""From the worker's turns to a client: which tokens are handed on together, and what a stream and its events make of them."""

import asyncio
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from engine_runs import ask, plain, prompt, run
from serving import NAME, byte_tokenizer, server_here, tiny_model
from serving import ask as ask_http

import tinyloop_py as tl
from tinyloop_py.serve import runner
from tinyloop_py.serve.errors import ServeError
from tinyloop_py.serve.event_parts import EventParts
from tinyloop_py.serve.event_stream import DONE, PING, EventStream, event
from tinyloop_py.serve.jobs import Job, PrefixTask
from tinyloop_py.serve.output import RunningOutput
from tinyloop_py.serve.requests import GenerationRequest, Output, Piece, Stream
from tinyloop_py.serve.responses import ChatShape, TextShape
from tinyloop_py.serve.runner import Runner
from tinyloop_py.serve.token_text import TokenText


@pytest.fixture
def model():
    with tl.Model(tiny_model(), 512, device="cpu", threads=1) as model:
        yield model


class Turns:
    """A runner on a clock of its own, in which a step takes as long as is said, and what it handed on: the numbers of tokens."""

    def __init__(self, model, monkeypatch, pool=None):
        self.now, self.step_seconds, self.n_steps, self.handed = 0.0, 2.0**-10, 0, []
        real = runner.step_generations

        def step(generations, rows):
            self.n_steps += 1
            self.now += self.step_seconds
            return real(generations, rows)

        monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(runner, "STRETCH_SECONDS", 1e9)
        monkeypatch.setattr(runner, "step_generations", step)
        self.runner = Runner(model, pool, None)

    def job(self, *arguments, **fields):
        request = ask(*arguments, **fields)
        return Job(request, Stream(request, lambda: None))

    def report(self, result):
        self.handed.append(sum(len(piece.tokens) for _, piece in result.pieces))

    def stretch(self, jobs, tasks=()):
        self.handed.clear()
        self.runner.stretch(list(jobs), list(tasks), lambda: None, self.report)
        return self.handed


def test_tokens_of_short_turns_are_handed_on_together_and_the_first_at_once(model, monkeypatch):
    turns = Turns(model, monkeypatch)
    assert runner.HOLD_SECONDS == 0.015
    assert turns.stretch([turns.job(5, 36)]) == [1, 15, 15, 5]


def test_tokens_of_longer_turns_are_handed_on_one_by_one(model, monkeypatch):
    turns = Turns(model, monkeypatch)
    turns.step_seconds = 0.008
    assert turns.stretch([turns.job(5, 5)]) == [1] * 5
    turns.step_seconds = 0.006
    assert turns.stretch([turns.job(5, 5)]) == [1, 2, 2]


def test_no_token_waits_where_a_prompt_runs(model, monkeypatch):
    turns = Turns(model, monkeypatch)
    turns.runner.prefill_rows = 16
    handed = turns.stretch([turns.job(5, 12), turns.job(64, 50)])
    assert handed == [0, 1, 1, 1, 2, 16]  # rows of the long prompt beside the short one's tokens; its first token; 8 of each
    turns.runner.abort()


def test_no_token_waits_where_a_prefix_is_built(model, monkeypatch):
    pool = tl.PrefixPool(4)
    turns = Turns(model, monkeypatch, pool)
    turns.runner.prefill_rows = 16
    assert turns.stretch([turns.job(5, 50)], [PrefixTask("t", "n", None, prompt(64))]) == [1, 1, 1, 1] and pool.size() == 1
    assert turns.stretch([]) == [15, 15, 15, 1]


def test_text_that_is_made_late_is_what_it_would_be_at_once(model, monkeypatch):
    turns, texts = Turns(model, monkeypatch), {}
    for stop in ((), ("no text that comes up",)):  # with it the text of every token is looked at when it is drawn
        pieces = []
        monkeypatch.setattr(turns, "report", lambda result, pieces=pieces: pieces.extend(piece for _, piece in result.pieces))
        turns.stretch([turns.job(9, 60, seed=4, stop=stop)])
        texts[stop] = [(piece.text, piece.tokens, piece.finish_reason) for piece in pieces]
    first, second = texts.values()
    assert len(first) == 60 and first[-1][2] == "length" and any(text == "" for text, _, _ in first)
    assert [item[1:] for item in first] == [item[1:] for item in second]
    assert "".join(item[0] for item in first) == "".join(item[0] for item in second)


@pytest.mark.parametrize("auto_prefix", [0, 1000])  # with it the text is first made for the pool, which does without where it fails
def test_a_text_that_cannot_be_made_is_that_requests_error(model, monkeypatch, auto_prefix):
    from tinyloop_py.serve import output

    class Broken(output.TextDecoder):
        def push(self, token):
            raise ValueError("injected")

    async def work(engine):
        monkeypatch.setattr(output, "TextDecoder", Broken)
        with pytest.raises(ServeError, match="injected"):
            await engine.submit(ask(5, 9, keep_turn=lambda text: [*prompt(5), 5, 6, 7])).collect()
        monkeypatch.undo()
        [whole] = await engine.submit(ask(5, 9)).collect()
        return whole.tokens

    assert run(model, work, tl.PrefixPool(4), auto_prefix=auto_prefix) == plain(model, ask(5, 9))


def test_who_calls_gets_what_waits(model, monkeypatch):
    turns = Turns(model, monkeypatch)
    job, real = turns.job(5, 400), runner.step_generations

    def step(generations, rows):
        turns.runner.called = turns.n_steps == 6
        return real(generations, rows)

    monkeypatch.setattr(runner, "step_generations", step)
    assert turns.stretch([job]) == [1, 6]
    turns.runner.abort()


def test_a_turn_that_fails_does_not_take_what_waits_with_it(model, monkeypatch):
    turns = Turns(model, monkeypatch)
    real = Runner._step

    def failing(self, result):
        if turns.n_steps == 5:
            raise KeyError("injected")
        return real(self, result)

    monkeypatch.setattr(Runner, "_step", failing)
    with pytest.raises(KeyError, match="injected"):
        turns.stretch([turns.job(5, 400)])
    assert turns.handed == [1, 4]
    turns.runner.abort()


def test_a_stream_gives_what_is_there_up_to_what_is_asked_for(model):
    async def work(engine):
        stream = engine.submit(ask(20, 30, seed=2))
        while engine.n_running or engine.n_waiting:
            await asyncio.sleep(0.001)
        taken = [await stream.take(7) for _ in range(6)]
        assert [len(pieces) for pieces in taken] == [7, 7, 7, 7, 2, 0] and stream.ended
        return [token for pieces in taken for piece in pieces for token in piece.tokens]

    assert run(model, work) == plain(model, ask(20, 30, seed=2))


def test_a_streams_error_comes_after_its_pieces_and_a_cancelled_one_gives_nothing():
    async def main():
        stream = Stream(ask(5, 9), lambda: None)
        for token in (7, 8):
            stream.feed(Piece(0, "", (token,)))
        stream.feed(ServeError(500, "injected"))
        assert [piece.tokens for piece in await stream.take(9)] == [(7,), (8,)] and stream.n_generated == 2
        with pytest.raises(ServeError, match="injected"):
            await stream.take(9)
        assert await stream.take(9) == [] and stream.ended
        stream = Stream(ask(5, 9), lambda: None)
        waiting = asyncio.ensure_future(stream.take(9))
        await asyncio.sleep(0)
        stream.cancel()
        stream.feed(Piece(0, "", (7,)))
        assert await waiting == [] and stream.n_generated == 1 and stream.ended

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("name", ["tiny", 'a "choices":[] name', "名"])
@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("kind", [ChatShape, TextShape])
def test_events_of_choices_are_those_of_their_chunks(kind, with_usage, name):
    shape = kind(name, "tl_0", None, None)
    choices = [shape.delta(i, text, (), reason, 0) for i, text, reason in ((0, 'a"choices":[]b', None), (1, "é\n", None), (0, "", "length"))]
    for listed in ([], choices[:1], choices):
        assert shape.events(listed, with_usage) == b"".join(event(shape.chunk([choice], with_usage)) for choice in listed)


@pytest.mark.parametrize("kind", [ChatShape, TextShape])
@pytest.mark.parametrize("with_usage", [False, True])
def test_the_events_of_pieces_are_those_of_their_choices(kind, with_usage):
    shape = kind("tiny", "tl_0", None, None)
    texts = ['a"b', "", "é\n\u2028", f"text of {shape.id}", "\x00\x1f\x7f"]
    pieces = [(index, Piece(index, text, (7,))) for text in texts for index in (0, 1)] + [(0, Piece(0, "z", (7,), (), "length"))]
    echo = "echo " if kind is TextShape else ""
    written = EventParts(shape, with_usage, lambda index: echo).of(pieces)
    chunks = [json.loads(data) for data in re.findall(rb"data: (.*)\n\n", written)]
    for index in (0, 1):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        shown = [choice["text"] if kind is TextShape else choice["delta"].get("content", "") for choice in choices]
        assert "".join(shown) == echo + "".join(texts) + ("z" if index == 0 else "")
        assert choices[1].keys() == choices[-1].keys() and choices[-1]["finish_reason"] == (None if index else "length")
    assert all(chunk.keys() == shape.chunk([], with_usage).keys() and chunk["id"] == shape.id for chunk in chunks)


@pytest.mark.parametrize(("stop", "shown"), [((), "é中😀bzz"), (("zz",), "é中😀b"), (("zq",), "é中😀bzz"), (("中😀",), "é")])
def test_the_offset_of_a_token_counts_whole_characters(stop, shown):
    tokenizer, text = byte_tokenizer(), "é中😀bzz"
    drawn = SimpleNamespace(finish_reason=None, logits=np.zeros(261, np.float32))
    output, whole = RunningOutput(drawn, 0, GenerationRequest([70], stop=stop, logprobs=0), tokenizer), Output()
    pieces = []
    for n_left, token in zip(range(len(text.encode()) - 1, -1, -1), tokenizer.encode(text).ids, strict=True):
        drawn.finish_reason = None if n_left else "length"
        output.take(token)
        pieces += output.pieces()
        if output.finish_reason is not None:
            break
    for piece in pieces:
        whole.add(piece)
    shape = TextShape("tiny", "tl_0", TokenText(tokenizer), 0)
    events = [
        json.loads(data) for data in re.findall(rb"data: (.*)\n\n", EventParts(shape, False, lambda index: "").of((0, piece) for piece in pieces))
    ]
    streamed = [offset for event in events for offset in event["choices"][0]["logprobs"]["text_offset"]]
    choice = shape.choice(0, whole)
    assert choice["text"] == shown and choice["logprobs"]["text_offset"] == streamed
    assert streamed == [len(text.encode()[:n].decode(errors="ignore")) for n in range(len(pieces))]


def test_tokens_that_are_sent_together_have_an_event_each():
    with server_here() as (url, _):
        body = {"model": NAME, "prompt": prompt(20), "max_tokens": 40, "ignore_eos": True, "stream": True, "logprobs": 0}
        events = re.findall(rb"data: (.*)\n\n", ask_http(url, "/v1/completions", body).body)
        assert events[-1] == b"[DONE]"
        choices = [json.loads(data)["choices"][0] for data in events[:-1]]
        assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [1] * 40
        assert [choice["finish_reason"] for choice in choices] == [None] * 39 + ["length"]


def sent(events, **options):
    """What an EventStream sends, as (body, more to come)."""
    messages = []

    async def send(message):
        messages.append(message)

    async def main():
        await EventStream(events(messages), **options)({}, None, send)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert messages[0]["type"] == "http.response.start"
    return [(message["body"], message["more_body"]) for message in messages[1:]]


def test_the_last_event_ends_the_answer():
    async def events(_):
        yield b"data: 1\n\n"
        yield b"data: 2\n\n" + DONE
        raise AssertionError("nobody asks for more")

    assert sent(events) == [(b"data: 1\n\n", True), (b"data: 2\n\n" + DONE, False)]


def test_an_error_is_the_last_event():
    error = ServeError(500, "injected")

    async def events(_):
        yield b"data: 1\n\n"
        raise error

    assert sent(events) == [(b"data: 1\n\n", True), (event(error.body()), False)]


def test_an_error_before_the_first_event_is_no_event():
    async def events(_):
        raise ServeError(503, "injected")
        yield b""

    with pytest.raises(ServeError, match="injected"):
        sent(events)


def test_a_reader_that_left_before_the_first_event_is_sent_nothing():
    async def events(_):
        return
        yield b""

    messages = []

    async def main():
        await EventStream(events(messages))({}, None, messages.append)

    asyncio.run(main())
    assert messages == []


def test_an_error_after_the_patience_is_an_event():
    error = ServeError(504, "injected")

    async def events(messages):
        while not messages:
            await asyncio.sleep(0.01)
        raise error
        yield b""

    assert sent(events, patience=0.0) == [(event(error.body()), False)]


def test_a_silent_stream_is_kept_open():
    async def events(messages):
        while PING not in [message.get("body") for message in messages]:
            await asyncio.sleep(0.01)
        yield DONE

    bodies = sent(events, patience=0.0, ping_seconds=0.0)
    assert bodies[-1] == (DONE, False) and set(bodies[:-1]) == {(PING, True)}


def test_turns_are_counted():
    from tinyloop_py.serve.metrics import SECONDS, Metrics

    metrics = Metrics(SimpleNamespace(status=("ok", ""), engine=None, model=None))
    for seconds, n_rows in ((0.004, 1), (0.005, 2), (0.006, 3), (400.0, 4)):
        metrics.turns.add(seconds, n_rows)
    lines = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if line[0] != "#")
    buckets = [float(lines[f'tinyloop_turn_seconds_bucket{{le="{bound}"}}']) for bound in (*map(float, SECONDS), "+Inf")]
    assert buckets == [2.0] + [3.0] * (len(SECONDS) - 1) + [4.0]
    assert float(lines["tinyloop_turn_seconds_count"]) == 4 and float(lines["tinyloop_output_steps_total"]) == 10
    assert float(lines["tinyloop_turn_seconds_sum"]) == pytest.approx(400.015)
