"""Bodies that come in chunks: where they end, on either event loop and whatever they hold, and what may follow them."""

import asyncio
import itertools
import random

import pytest

for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

import httptools
from serving_app import Served, answers, asked, echo, run

from tinyloop_py.serve.errors import ServeError
from tinyloop_py.serve.request_head import PART_BYTES, ChunkedBody, _Further

CHUNKED = "POST / HTTP/1.1\nhost: x\ntransfer-encoding: chunked\n"


@pytest.fixture(params=["asyncio", "uvloop"])
def new_loop(request):
    return asyncio.new_event_loop if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop


def test_fields_at_the_end_of_a_chunked_body_are_none_of_the_request(new_loop):
    async def main():
        async with Served(echo) as served:
            data = asked(CHUNKED, b"2;a=b\r\nhi\r\n1\r\n!\r\n0\r\nauthorization: Bearer x\r\n\r\n")
            for size in (1, 5, len(data)):
                [(status, _, body)] = answers(await served.ask(*[data[at : at + size] for at in range(0, len(data), size)]))
                assert status == 200 and body["body"] == "hi!" and "authorization" not in dict(body["headers"])

    run(new_loop, main)


FOLLOWERS = [
    asked("GET /b HTTP/1.1\nhost: x\n"), asked("POST /b HTTP/1.1\nhost: x\ncontent-length: 5\n", b"hello"),
    asked("POST /b HTTP/1.1\nhost: x\ntransfer-encoding: chunked\n", b"3;a=b\r\nhel\r\n2\r\nlo\r\n0\r\nx: y\r\n\r\n"),
    asked("GET /b HTTP/1.1\nhost: x\nupgrade: h2c\n"), b"\r\n" + asked("GET /b HTTP/1.1\nhost: x\n"),
]  # fmt: skip


@pytest.mark.parametrize("follower", FOLLOWERS)
@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"0;a=b\r\nx: y\r\nz:\r\n\r\n"])
def test_what_follows_a_chunked_body_is_the_next_request(new_loop, follower, end):
    async def main():
        async with Served(echo) as served:
            data = asked(CHUNKED, b"4\r\n\r\n\r\n\r\n2\r\nhi\r\n" + end, close=False)
            for cuts in ([], [len(data) - 1], [len(data)], [len(data) + 1], range(1, len(data + follower))):
                edges = [0, *cuts, len(data + follower)]
                first, second = answers(await served.ask(*[(data + follower)[a:b] for a, b in itertools.pairwise(edges)]))
                assert first[0] == second[0] == 200 and first[2]["body"] == "\r\n\r\nhi" and second[2]["path"] == "/b"
                assert second[2]["body"] == ("" if b"GET" in follower else "hello")
                assert not {"x", "z"} & dict(second[2]["headers"]).keys()  # the first one's

    run(new_loop, main)


END = b"\r\n0\r\n\r\n"
ELSEWHERE = [
    b"2\nhi\n0\n\n", b"2\r\nhi\r\n0\n\n", b"2\r\nhi\r\n0\r\n\n", b"2\r\nhi\r\n0\r\n\rX", b"2;a\nhi" + END, b"2;\nxx\r\nhi" + END, b"2 \r\nhi" + END,
    b"+2\r\nhi" + END, b"0x2\r\nhi" + END, b"-2\r\nhi\r\n", b"10000000000000002\r\nhi" + END, b"\r\n2\r\nhi" + END, b"2\rX\nhi" + END,
    b"2\r\nhi0\r\n\r\n",
    b"2\r\nhi\n0\r\n\r\n", b"2\r\nhi\r\n0\r\nx: y\n\r\n", b"2\r\nhi\r\n0\r\n x: y\r\n\r\n", b"2\r\nhi\r\n0\r\ncontent-length: 5\r\n\r\n",
    b"2\r\nhi\r\n0\r\nxx\r\n\r\n", b'2;a="\n"\r\nhi' + END, b"2;a\rb\r\nhi" + END, b"3\r\nhi" + END, b"1\r\nhi" + END,
]  # fmt: skip


@pytest.mark.parametrize("body", ELSEWHERE)
def test_nothing_follows_a_chunked_body_of_which_others_may_see_another_end(new_loop, body):
    async def main():
        async with Served(echo) as served:
            [(status, head, _)] = answers(await served.ask(asked(CHUNKED, body + FOLLOWERS[0], close=False)))
            assert status == 400 and b"connection: close" in head

    run(new_loop, main)


@pytest.mark.parametrize("seed", range(20))
def test_a_chunked_body_ends_where_it_ends_whatever_it_holds(seed):
    rng = random.Random(seed)
    content = bytes(rng.choices(b"\r\n\r\n0a", k=rng.choice([0, 1, 20, 40_000])))
    data, at = b"", 0
    while at < len(content):
        part = content[at : at + rng.choice([1, 2, 3, 30, 20_000])]
        at += len(part)
        data += b"%x\r\n%b\r\n" % (len(part), part)
    data += rng.choice([b"0\r\n\r\n", b"0\r\na: b\r\n\r\n"])
    body, n_taken = ChunkedBody(), 0
    whole = data + b"\r\n\r\nGET"
    while not body.whole:
        n = rng.choice([1, 2, 5, 1000, 1 << 20])
        n_fed = body.feed(whole[n_taken : n_taken + n])
        assert n_fed == len(whole[n_taken : n_taken + n]) or body.whole
        n_taken += n_fed
    assert n_taken == len(data) and body.data == content and body.feed(b"GET") == 0


class Lax:
    """A parser that ends a body at any empty line, and sees what follows as the next request."""

    def __init__(self, sink):
        self._sink = sink

    def feed_data(self, data):
        if not self._sink.whole and b"\n\n" in data:
            self._sink.on_message_complete()
            data = data.partition(b"\n\n")[2]
        if self._sink.whole and data:
            with pytest.raises(_Further):
                self._sink.on_message_begin()
            raise httptools.HttpParserCallbackError("stopped")


@pytest.mark.parametrize("rest", [b"", b"\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_a_body_that_a_lax_parser_ends_elsewhere_is_refused(rest):
    body = ChunkedBody()
    body._parser, body._behind = Lax(body._parsed), Lax(body._ended)
    with pytest.raises(ServeError):
        body.feed(b"0\n\n" + rest)


def test_a_body_of_empty_lines_is_not_taken_apart():
    body, n_fed = ChunkedBody(), []
    real = body._behind

    class Counted:
        def feed_data(self, data):
            n_fed.append(len(data))
            real.feed_data(data)

    body._behind = Counted()
    n = 1 << 20
    data = b"%x\r\n" % n + b"\r\n" * (n // 2) + b"\r\n0\r\n\r\nGET"
    assert body.feed(data) == len(data) - 3 and len(body.data) == n
    assert sum(n_fed) == len(data) - 3 and len(n_fed) < 2 * n // PART_BYTES + PART_BYTES
