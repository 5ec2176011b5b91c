"""What is asked on a connection: a request's head, parsed strictly, and a body that comes in chunks."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import httptools

from .errors import ServeError

MAX_HEAD_BYTES = 32 << 10
NO_BODY = ("GET", "HEAD", "OPTIONS", "CONNECT", "TRACE")  # those that mean nothing by one: an answer is given before it is read
PART_BYTES = 8 << 10  # of a chunked body, that are looked at together


def bad_http(message: str = "Invalid HTTP request received.", status: int = 400) -> ServeError:
    """What is no HTTP/1.1, or none that is spoken here."""
    return ServeError(status, message, code="bad_http")


class _Further(Exception):
    """Another request begins: it stops the parser, which would take its fields and its body for more of this one's."""


class _Parsed:
    """What the parser has found. It is given the bytes of one request alone, but for those that follow a chunked body at once."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.has_head = self.whole = self.overrun = False

    def on_message_begin(self) -> None:
        if self.whole:
            self.overrun = True
            raise _Further

    def on_url(self, part: bytes) -> None:
        self.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # else it stands at the end of a chunked body, where none means anything here
            self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, part: bytes) -> None:
        self.body += part

    def on_message_complete(self) -> None:
        self.whole = True


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
        self._parsed = _Parsed()
        self._parser = httptools.HttpRequestParser(self._parsed)
        upgrades = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            upgrades = True
        except httptools.HttpParserError:
            raise bad_http() from None
        if not self._parsed.has_head:
            raise bad_http()
        self.nbytes = len(data)
        self.method = self._parser.get_method().decode("ascii")
        self.version = self._parser.get_http_version()
        self.headers = self._parsed.headers
        self.keep_alive = self.version == "1.1"
        self.expects_continue = False
        self.n_body: int | None = 0
        if b" HTTP/" not in data.partition(b"\n")[0]:  # the parser knows other protocols too
            raise bad_http("Only HTTP is spoken here; send HTTP/1.1.", 505)
        self._read_fields()
        self._read_target(self._parsed.target)
        if self.n_body is None and upgrades:
            raise bad_http("A request with a chunked body cannot ask for another protocol.")

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

    def body(self) -> ChunkedBody:
        """The reader of a body that comes in chunks."""
        return ChunkedBody(self._parser, self._parsed)

    def scope(self, **fields: Any) -> dict[str, Any]:
        """As ASGI describes a request."""
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": self.version, "scheme": "http", "root_path": "",
            "method": self.method, "path": self.path, "raw_path": self.raw_path, "query_string": self.query, "headers": self.headers, **fields,
        }  # fmt: skip


class ChunkedBody:
    """A body that comes in chunks. What stands beside them (their sizes, fields at the end) is bounded like a head, and dropped."""

    def __init__(self, parser: httptools.HttpRequestParser, parsed: _Parsed) -> None:
        self._parser, self._parsed = parser, parsed
        self._n_beside = 0  # bytes since the last one of the body

    @property
    def data(self) -> bytearray:
        """What has come of it."""
        return self._parsed.body

    @property
    def whole(self) -> bool:
        """Whether it has come."""
        return self._parsed.whole

    @property
    def overrun(self) -> bool:
        """Whether something of a further request came with its end, which is lost."""
        return self._parsed.overrun

    def feed(self, data: bytes) -> None:
        """Take what comes; ServeError where it is wrong."""
        for at in range(0, len(data), PART_BYTES):
            if self.whole:
                self._parsed.overrun = True
                return
            self._feed(data[at : at + PART_BYTES])

    def _feed(self, part: bytes) -> None:
        n = len(self.data)
        try:
            self._parser.feed_data(part)
        except httptools.HttpParserError:
            if not self.whole:
                raise bad_http() from None
            self._parsed.overrun = True
        self._n_beside = 0 if len(self.data) > n else self._n_beside + len(part)
        if self._n_beside > MAX_HEAD_BYTES and not self.whole:
            raise bad_http("A chunked body has too much beside its chunks.")
