"""tinyloop serve MODEL: OpenAI's API over HTTP, for many tenants."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from .generate import DEMO, add_model_options

if TYPE_CHECKING:
    from ..serve.settings import Settings

MOST_PORT = 65535
MOST = 1 << 53  # of numbers and seconds: "inf" is a typo as much as "nan" is
MORE_FILES = 256  # than connections: those that are refused and not yet gone, the model, the event loop
LEAST = {
    "port": 0, "max_seq_len": 1, "threads": 1, "kv_budget": 1, "max_running": 1, "max_queued": 1, "prefill_rows": 16, "deadline": 0.1, "window": 0,
    "default_max_tokens": 1, "pool_capacity": 1, "pool_bytes": 1, "auto_prefix": 0, "max_body": 1024, "max_connections": 1, "header_timeout": 0.1,
    "body_timeout": 0.1, "write_timeout": 0.1, "write_rate": 0, "idle_timeout": 1, "shutdown_grace": 0,
}  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "serve", help="serve a model over HTTP", description="Serve a model over HTTP with OpenAI's API, a prefix pool and many tenants."
    )
    parser.add_argument("model", metavar="MODEL", help=f"a .tinyloop file, or '{DEMO}' for the one that comes with tinyloop")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default %(default)s)")
    parser.add_argument("--model-name", default="", help="what requests call the model (default: the file's stem)")
    add_model_options(parser)
    parser.add_argument("--kv-budget", type=int, metavar="BYTES", help="most bytes of KV pages (default: what memory holds)")
    seconds: Any = {"type": float, "metavar": "SECONDS"}
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--max-running",
        type=int,
        default=8,
        help="most outputs that share a step, and most prefixes being registered (default %(default)s)",
    )
    engine.add_argument("--max-queued", type=int, default=64, help="most requests that wait; further ones get status 429 (default %(default)s)")
    engine.add_argument("--prefill-rows", type=int, help="most rows of prompts between two tokens of the others (default 128; 512 on a GPU)")
    engine.add_argument("--deadline", default=300.0, help="most time of a request, waiting included (default %(default)g)", **seconds)
    engine.add_argument("--window", type=int, default=0, help="sliding window of attention in positions (default %(default)s: none)")
    engine.add_argument("--default-max-tokens", type=int, default=1024, help="of a chat that names none (default %(default)s)")
    pool = parser.add_argument_group("prefixes")
    pool.add_argument("--pool-capacity", type=int, default=256, help="most prefixes in the pool (default %(default)s)")
    pool.add_argument("--pool-bytes", type=int, metavar="BYTES", help="most bytes of the pool (default: no limit)")
    pool.add_argument(
        "--auto-prefix",
        type=int,
        default=0,
        metavar="TOKENS",
        help="keep system messages and finished turns, up to so many tokens (default %(default)s: none)",
    )
    pool.add_argument("--pool-file", metavar="PATH", help="load the pool from this file at the start, save it there at the end")
    access = parser.add_argument_group("access and limits")
    access.add_argument("--keys", metavar="FILE", help="key file with the tenants; see `tinyloop key`")
    access.add_argument("--no-auth", action="store_true", help="serve other machines without keys")
    access.add_argument("--max-body", type=int, default=2 << 20, metavar="BYTES", help="largest request body (default %(default)s)")
    access.add_argument("--max-connections", type=int, default=256, help="most connections at a time (default %(default)s)")
    access.add_argument("--header-timeout", default=10.0, help="for a request's head to arrive (default %(default)g)", **seconds)
    access.add_argument("--body-timeout", default=30.0, help="for a request's body to arrive (default %(default)g)", **seconds)
    access.add_argument("--write-timeout", default=60.0, help="for a client to take some of what is sent to it (default %(default)g)", **seconds)
    access.add_argument(
        "--write-rate", type=int, default=1000, metavar="BYTES", help="least bytes a second that a client takes which is behind (default %(default)s)"
    )
    access.add_argument("--idle-timeout", default=75.0, help="for a connection to stay open after an answer (default %(default)g)", **seconds)
    access.add_argument("--shutdown-grace", default=30.0, help="for streams to finish when the server stops (default %(default)g)", **seconds)
    access.add_argument("--log-prompts", action="store_true", help="write prompts into the log")
    parser.set_defaults(run=run)


def settings_from(args: argparse.Namespace) -> Settings:
    """The settings that the options name; ValueError for those that cannot be."""
    from ..serve.pool_file import check_pool_path
    from ..serve.settings import Settings

    if args.host_is_open and not args.keys and not args.no_auth:
        raise ValueError(f"--host {args.host} can be reached from other machines: give --keys FILE, or --no-auth if everybody may use it")
    for name, least in LEAST.items():
        value, most = getattr(args, name), MOST_PORT if name == "port" else MOST
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected {least} to {most}")
    if args.model == DEMO:
        import tinyloop_py as tl

        args.model, args.model_name = os.fspath(tl.demo_model()), args.model_name or DEMO
    if args.pool_file:
        check_pool_path(args.pool_file)
    if not os.path.exists(args.model):
        raise FileNotFoundError(f"there is no model file {args.model}")
    return Settings(
        model=args.model, model_name=args.model_name, max_seq_len=args.max_seq_len, device=args.device, threads=args.threads, kv_mode=args.kv_mode,
        kv_budget=args.kv_budget, max_running=args.max_running, max_queued=args.max_queued, prefill_rows=args.prefill_rows, window=args.window,
        deadline=args.deadline, default_max_tokens=args.default_max_tokens, pool_capacity=args.pool_capacity, pool_bytes=args.pool_bytes,
        auto_prefix=args.auto_prefix, pool_file=args.pool_file, key_file=args.keys, max_body_bytes=args.max_body,
        max_connections=args.max_connections, header_seconds=args.header_timeout, body_seconds=args.body_timeout,
        write_seconds=args.write_timeout, write_rate=args.write_rate, idle_seconds=args.idle_timeout, shutdown_grace=args.shutdown_grace,
        log_prompts=args.log_prompts, check_host=not args.keys and not args.no_auth,
    )  # fmt: skip


def allow_files(n_connections: int) -> None:
    """Raises the process's own limit of open files to what its connections need: those beyond it would be closed without a word."""
    try:
        import resource
    except ModuleNotFoundError:  # not a POSIX system
        return
    needed = n_connections + MORE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a system that has another limit too
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft != resource.RLIM_INFINITY and soft < needed:
        text = "this process may open %d files; for --max-connections %d it should be %d (ulimit -n, LimitNOFILE=)"
        logging.getLogger("tinyloop.serve").warning(text, soft, n_connections, needed)


def spare_the_collector() -> None:
    """What was loaded stays: the garbage collector need not look at it again, nor at what is new for each few requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    try:
        from ..serve.access import write_logs_to_stderr
        from ..serve.loopback import is_loopback
        from ..serve.server import make_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "tinyloop_py":
            raise
        raise ImportError(f"tinyloop serve needs {error.name}: pip install '.[serve]' in a clone of tinyloop") from None
    args.host_is_open = not is_loopback(args.host)
    settings = settings_from(args)
    write_logs_to_stderr()
    allow_files(settings.max_connections)
    sys.setswitchinterval(0.001)  # the worker waits for the interpreter's lock after every step, no longer than this
    server = make_server(settings, args.host, args.port)
    server.service.on_ready = spare_the_collector
    started = server.startup

    async def startup(sockets: object = None) -> None:
        await started(sockets=None)
        ports = [s.getsockname()[1] for one in server.servers for s in one.sockets]
        host = f"[{args.host}]" if ":" in args.host else args.host
        print(json.dumps({"listening": f"http://{host}:{ports[0] if ports else args.port}"}), flush=True)

    server.startup = startup  # type: ignore[method-assign]
    server.run()
    return 0 if server.succeeded else 1
