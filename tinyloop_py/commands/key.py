"""tinyloop key FILE TENANT: a new API key for a tenant of the server."""

from __future__ import annotations

import argparse

LIMITS = {
    "max_requests": "most requests of the tenant that are open at a time",
    "requests_per_minute": "most requests of the tenant a minute",
    "tokens_per_minute": "most tokens of the tenant a minute, of prompts and outputs",
    "max_pinned_tokens": "most tokens of the tenant's pinned prefixes, 65536 if not given",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "key", help="make an API key for the server",
        description="Make an API key for a tenant and print it; the key file, made where it is missing, keeps its hash alone.",
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE", help="the key file that `tinyloop serve --keys` reads")
    parser.add_argument("tenant", metavar="TENANT", help="whose key it is: letters, digits, '.', '_' and '-'")
    parser.add_argument("--operator", action="store_true", help="the tenant may read /metrics, which tells of all tenants")
    for name, meaning in LIMITS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=meaning)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Add the key and print it."""
    from ..serve.tenants import add_key

    settings = {name: getattr(args, name) for name in LIMITS if getattr(args, name) is not None}
    print(add_key(args.file, args.tenant, {**settings, "operator": True} if args.operator else settings))
    return 0
