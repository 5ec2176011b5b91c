"""All that can be set on a server, with its defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How a model is served. Times are in seconds."""

    model: str  # path of a .tinyloop file
    model_name: str = ""  # what requests call it; "" takes the file's stem
    max_seq_len: int = 2048
    device: str = "auto"
    threads: int | None = None
    kv_mode: str | None = None
    kv_budget: int | None = None
    # the engine
    max_running: int = 8
    max_queued: int = 64
    prefill_rows: int | None = None  # the engine's choice
    window: int = 0
    deadline: float = 300.0
    default_max_tokens: int = 1024  # of a chat that names none; less where the context ends before
    # the pool
    pool_capacity: int = 256
    pool_bytes: int | None = None
    auto_prefix: int = 0
    pool_file: str | None = None
    # tenants
    key_file: str | None = None
    # limits of HTTP
    max_body_bytes: int = 2 << 20
    max_connections: int = 256
    header_seconds: float = 10.0  # from a connection's start, or an answer's end, to a whole request head
    body_seconds: float = 30.0
    write_seconds: float = 60.0  # so often is looked whether a client takes what is sent to it
    write_rate: int = 1000  # bytes a second that it takes at least where it is behind
    idle_seconds: float = 75.0
    shutdown_grace: float = 30.0
    # logs
    log_prompts: bool = False
    check_host: bool = False  # refuse Host headers that are not this machine's own: for use without keys
