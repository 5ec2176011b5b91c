"""The real client of OpenAI's API against the server: what it sends is understood, what it gets is what it expects."""

import asyncio
import itertools
import threading
import time

import pytest

openai = pytest.importorskip("openai")
for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from engine_runs import held_steps
from serving import NAME, ask, server_here, wait_until

import tinyloop_py as tl

HI = [{"role": "user", "content": "hi"}]
OWN = {"ignore_eos": True}


@pytest.fixture(scope="module")
def served():
    with server_here(auto_prefix=10_000, max_seq_len=1024) as (url, service):
        yield url, service


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served[0] + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_chat_whole_and_streamed(client):
    whole = client.chat.completions.create(model=NAME, messages=HI, seed=5, max_completion_tokens=10, extra_body=OWN)
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 10 and isinstance(whole.usage.prompt_tokens_details.cached_tokens, int)
    stream = client.chat.completions.create(
        model=NAME, messages=HI, seed=5, max_completion_tokens=10, stream=True, stream_options={"include_usage": True}, extra_body=OWN
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 10
    assert chunks[-2].choices[0].finish_reason == "length"


def test_the_stream_helper_of_the_client(client):
    with client.chat.completions.stream(model=NAME, messages=HI, seed=5, max_completion_tokens=6, extra_body=OWN) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        with pytest.raises(openai.LengthFinishReasonError) as raised:
            stream.get_final_completion()
    assert raised.value.completion.choices[0].message.content == text


def test_completions_whole_streamed_and_as_ids(client):
    whole = client.completions.create(model=NAME, prompt="abc", seed=5, max_tokens=7, logprobs=2, extra_body=OWN)
    assert whole.choices[0].logprobs.token_logprobs[0] <= 0 and len(whole.choices[0].logprobs.tokens) == 7
    stream = client.completions.create(model=NAME, prompt="abc", seed=5, max_tokens=7, stream=True, extra_body=OWN)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    many = client.completions.create(model=NAME, prompt=[[70, 71], [72]], n=2, max_tokens=2, extra_body=OWN)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]


def test_logprobs_of_a_chat(client):
    whole = client.chat.completions.create(model=NAME, messages=HI, max_tokens=3, logprobs=True, top_logprobs=4, extra_body=OWN)
    content = whole.choices[0].logprobs.content
    assert len(content) == 3 and all(len(item.top_logprobs) == 4 and isinstance(item.bytes, list) for item in content)


def test_a_message_in_parts(client):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    a = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": parts}], seed=1, max_tokens=5)
    b = client.chat.completions.create(model=NAME, messages=HI, seed=1, max_tokens=5)
    assert a.choices[0].message.content == b.choices[0].message.content


def test_fields_that_change_nothing_are_taken(client):
    plain = client.chat.completions.create(model=NAME, messages=HI, max_tokens=3, temperature=0)
    answer = client.chat.completions.create(
        model=NAME, messages=HI, max_tokens=3, temperature=0, user="u", metadata={"a": "b"}, store=False, service_tier="auto",
        parallel_tool_calls=True, presence_penalty=0, frequency_penalty=0, response_format={"type": "text"}, tools=[],
        prompt_cache_key="k", reasoning_effort="low",
    )  # fmt: skip
    assert answer.choices == plain.choices


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "tinyloop"


def test_errors_are_the_clients_own_exceptions(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=HI)
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=NAME, messages=HI, max_tokens=5000)
    assert raised.value.code == "context_length_exceeded" and raised.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=NAME, messages=HI, tools=[{"type": "function", "function": {"name": "f"}}])
    assert raised.value.param == "tools" and raised.value.code == "unsupported_parameter"


def test_an_error_in_mid_stream_reaches_the_client(client, served, monkeypatch):
    from tinyloop_py.serve import runner

    real, turns = runner.step_generations, itertools.count()

    def failing(generations, rows):
        if next(turns) < 4:
            return real(generations, rows)
        raise RuntimeError("injected")

    monkeypatch.setattr(runner, "step_generations", failing)
    stream = client.chat.completions.create(model=NAME, messages=HI, max_tokens=500, stream=True, extra_body=OWN)
    next(stream)
    with pytest.raises(openai.APIError, match="model failed"):
        list(stream)
    monkeypatch.undo()
    assert client.chat.completions.create(model=NAME, messages=HI, max_tokens=2, extra_body=OWN).usage.completion_tokens == 2


def test_a_full_queue_is_a_rate_limit_error():
    with held_steps() as held, server_here(max_running=1, max_queued=1, max_seq_len=4096) as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        create = client.chat.completions.create
        held.allow(1)
        streams = [create(model=NAME, messages=HI, max_tokens=3000, stream=True, extra_body=OWN)]
        next(streams[0])
        waiting = threading.Thread(target=lambda: create(model=NAME, messages=HI, max_tokens=1))
        waiting.start()
        wait_until(lambda: b"tinyloop_requests_waiting 1.0" in ask(url, "/metrics").body, "one waits")
        with pytest.raises(openai.RateLimitError) as raised:
            create(model=NAME, messages=HI, max_tokens=1)
        assert int(raised.value.response.headers["retry-after"]) >= 1
        streams[0].close()
        held.open()
        waiting.join(60)
        assert not waiting.is_alive()
        client.close()


async def until(condition):
    """Wait in the event loop for what comes; the limit only keeps a failing test from hanging."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def test_async_streams_side_by_side_and_cancelled(served):
    url, service = served

    async def main():
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:

            async def one(seed):
                stream = await client.chat.completions.create(model=NAME, messages=HI, seed=seed, max_tokens=20, stream=True, extra_body=OWN)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            alone = [await one(seed) for seed in range(4)]
            assert await asyncio.gather(*map(one, range(4))) == alone
            with held_steps() as held:  # neither would end by itself
                held.allow(1)
                stream = await client.chat.completions.create(model=NAME, messages=HI, max_tokens=900, stream=True, extra_body=OWN)
                await stream.__anext__()
                assert service.engine.n_running == 1
                await stream.close()
                await until(lambda: all(job.cancelled for job in service.engine._requests.running))
                held.allow(1)  # the step that it is in
                await until(lambda: service.engine.n_running == 0)
                whole = asyncio.ensure_future(client.chat.completions.create(model=NAME, messages=HI, max_tokens=900, extra_body=OWN))
                await until(lambda: service.engine.n_running == 1)
                whole.cancel()
                await asyncio.gather(whole, return_exceptions=True)
                await until(lambda: all(job.cancelled for job in service.engine._requests.running))
                held.allow(1)  # the step that it is in
                await until(lambda: service.engine.n_running == 0)

    asyncio.run(main())


def test_a_conversation_with_the_model_of_the_package():
    """Words, a real chat template, stop ids: the second turn's prompt is cached up to where the first ended."""
    with server_here(model=tl.demo_model(), model_name="demo", auto_prefix=10_000, max_seq_len=512, max_running=2) as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)
        messages = [{"role": "system", "content": "You are a helpful assistant who answers every question in one short sentence."}]
        messages.append({"role": "user", "content": "What is a cat?"})
        first = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=16)
        assert first.choices[0].message.content.isascii() and first.usage.prompt_tokens_details.cached_tokens == 0
        messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And a dog?"}]
        second = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=4)
        assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
        shallow = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=4, extra_body={"loops": 2})
        assert shallow.usage.prompt_tokens_details.cached_tokens == 0
        client.close()
