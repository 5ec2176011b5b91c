"""What is asked on a connection: a request's head, parsed strictly, and a body that comes in chunks."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import httptools

from .errors import ServeError

MAX_HEAD_BYTES = 32 << 10
NO_BODY = ("GET", "HEAD", "OPTIONS", "CONNECT", "TRACE")  # those that mean nothing by one: an answer is given before it is read
PART_BYTES = 8 << 10  # of a chunked body, that are looked at together
EMPTY_LINE = b"\r\n\r\n"  # what a chunked body ends with, and nothing else does in the parser's eyes


def bad_http(message: str = "Invalid HTTP request received.", status: int = 400) -> ServeError:
    """What is no HTTP/1.1, or none that is spoken here."""
    return ServeError(status, message, code="bad_http")


class _Further(Exception):
    """Another request begins: it stops the parser, which would take its body for more of this one's."""


class _Ended:
    """Whether the parser has found a request's end."""

    whole = False

    def on_message_begin(self) -> None:
        if self.whole:
            raise _Further

    def on_message_complete(self) -> None:
        self.whole = True


class _Parsed(_Ended):
    """What the parser has found. It is given the bytes of one request alone, but for those that follow a chunked body at once."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.has_head = False

    def on_url(self, part: bytes) -> None:
        self.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # else it stands at the end of a chunked body, where none means anything here
            self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, part: bytes) -> None:
        self.body += part


class RequestHead:
    """The head of one request.

    Parameters
    ----------
    data
        All of it, the empty line at its end included.

    Attributes
    ----------
    n_body : int or None
        Bytes of the body; None where it comes in chunks.

    Notes
    -----
    Raises ServeError for what is not plain HTTP/1.0 or 1.1. A wish for another protocol (Upgrade) is not heard.
    """

    def __init__(self, data: bytes) -> None:
        parsed = _Parsed()
        parser = httptools.HttpRequestParser(parsed)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            raise bad_http() from None
        if not parsed.has_head:
            raise bad_http()
        self.nbytes = len(data)
        self.method = parser.get_method().decode("ascii")
        self.version = parser.get_http_version()
        self.headers = parsed.headers
        self.keep_alive = self.version == "1.1"
        self.expects_continue = False
        self.n_body: int | None = 0
        if b" HTTP/" not in data.partition(b"\n")[0]:  # the parser knows other protocols too
            raise bad_http("Only HTTP is spoken here; send HTTP/1.1.", 505)
        self._read_fields()
        self._read_target(parsed.target)

    def _read_fields(self) -> None:
        if self.version not in ("1.0", "1.1"):
            raise bad_http(f"HTTP/{self.version} is not spoken here; send HTTP/1.1.", 505)
        n_hosts = 0
        for name, value in self.headers:
            if name == b"host":
                n_hosts += 1
            elif name == b"content-length":  # the parser lets one through, of digits, and none beside chunks
                self.n_body = int(value.lstrip(b"0") or b"0")  # Python reads no number of thousands of digits, be they zeros
            elif name == b"transfer-encoding":
                if self.version == "1.0" or self.n_body is None or value.lower() != b"chunked":
                    raise bad_http("Of transfer encodings only 'chunked' is understood, in HTTP/1.1.", 501)
                self.n_body = None
            elif name == b"connection":
                self.keep_alive = self.keep_alive and b"close" not in (token.strip() for token in value.lower().split(b","))
            elif name == b"expect":
                self.expects_continue = self.version == "1.1" and value.lower() == b"100-continue"
        if n_hosts > 1 or (n_hosts == 0 and self.version == "1.1"):
            raise bad_http("A request has one Host header.")

    def _read_target(self, target: bytes) -> None:
        """The path; of a whole URL (`GET http://host/path`), as those that go to a proxy are, it is the URL's host that counts."""
        raw, _, self.query = target.partition(b"?")
        scheme, found, rest = raw.partition(b"://")
        if found and scheme.lower() in (b"http", b"https"):
            host, slash, path = rest.partition(b"/")
            raw = slash + path or b"/"
            self.headers = [(b"host", host), *(field for field in self.headers if field[0] != b"host")]
        try:
            text = raw.decode("ascii")
        except UnicodeDecodeError:
            raise bad_http() from None
        self.raw_path = raw
        self.path = unquote(text) if "%" in text else text

    def scope(self, **fields: Any) -> dict[str, Any]:
        """As ASGI describes a request."""
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": self.version, "scheme": "http", "root_path": "",
            "method": self.method, "path": self.path, "raw_path": self.raw_path, "query_string": self.query, "headers": self.headers, **fields,
        }  # fmt: skip


class ChunkedBody:
    """A body that comes in chunks. What stands beside them (their sizes, fields at the end) is bounded like a head, and dropped.

    The parser does not tell where in what it is given a body ends. So a second one stays behind it by a part: when the first has found
    the end, the second is given that part in pieces, each of them up to an empty line. A body ends with one: then the end is that of
    a piece, and the next byte is the next request's first.
    """

    def __init__(self) -> None:
        self._parsed, self._ended = _Parsed(), _Ended()
        self._parser, self._behind = (httptools.HttpRequestParser(one) for one in (self._parsed, self._ended))
        for parser in (self._parser, self._behind):
            parser.feed_data(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")  # after the real head it might read no body (Upgrade)
        self._n_beside = 0  # bytes since the last one of the body
        self._tail = b""  # the last of what came: an empty line may come in parts

    @property
    def data(self) -> bytearray:
        """What has come of it."""
        return self._parsed.body

    @property
    def whole(self) -> bool:
        """Whether it has come."""
        return self._parsed.whole

    def feed(self, data: bytes) -> int:
        """Take what comes, up to the body's end: how many bytes it has taken. ServeError where something is wrong."""
        for at in range(0, len(data), PART_BYTES):
            if self.whole:
                return 0
            part = data[at : at + PART_BYTES]
            self._feed(part)
            if self.whole:
                return at + self._find_end(part)
            _parse(self._behind, part)
            self._tail = (self._tail + part[-len(EMPTY_LINE) :])[1 - len(EMPTY_LINE) :]
        return len(data)

    def _feed(self, part: bytes) -> None:
        n = len(self.data)
        try:
            _parse(self._parser, part)
        except ServeError:
            if not self.whole:  # else it is what follows that is wrong
                raise
        self._n_beside = 0 if len(self.data) > n else self._n_beside + len(part)
        if self._n_beside > MAX_HEAD_BYTES and not self.whole:
            raise bad_http("A chunked body has too much beside its chunks.")

    def _find_end(self, part: bytes) -> int:
        text, at = self._tail + part, len(self._tail)
        while (found := text.find(EMPTY_LINE, max(0, at - len(EMPTY_LINE) + 1))) >= 0:
            end = found + len(EMPTY_LINE)
            _parse(self._behind, text[at:end])
            if self._ended.whole:
                return end - len(self._tail)
            at = end
        raise bad_http("A chunked body ends with an empty line.")  # a parser laxer than the one that this was written for has seen another end


def _parse(parser: httptools.HttpRequestParser, data: bytes) -> None:
    try:
        parser.feed_data(data)
    except httptools.HttpParserError:
        raise bad_http() from None
