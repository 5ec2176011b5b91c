"""/v1/prefixes: a tenant's prefixes in the pool, to list, register and drop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from ..pool_report import PrefixEntry
from .access import CurrentService, CurrentTenant, note
from .errors import ServeError, bad_request
from .event_stream import ClientGone, unless_gone
from .prefix_id import prefix_id
from .routes_openai import ERRORS
from .schemas import PrefixRequest
from .service import Service
from .strict_body import StrictRoute
from .tenants import Tenant

PREVIEW_TOKENS = 32

router = APIRouter(route_class=StrictRoute, prefix="/v1/prefixes", tags=["prefixes"], responses=ERRORS)


class PrefixObject(BaseModel):
    """A prefix in the pool."""

    id: str
    object: str
    n_tokens: int
    loops: int
    namespace: str | None
    pinned: bool
    automatic: bool
    hits: int
    nbytes: int
    preview: str


class RegisteredPrefix(PrefixObject):
    """A prefix that was just registered."""

    cached_tokens: int


class PrefixList(BaseModel):
    """A tenant's prefixes, longest first."""

    object: str
    data: list[PrefixObject]


class Deleted(BaseModel):
    """A prefix is gone."""

    id: str
    object: str
    deleted: bool


@router.get("", response_model=PrefixList)
async def list_prefixes(service: CurrentService, tenant: CurrentTenant) -> dict[str, Any]:
    """The tenant's own prefixes."""
    service.ready()
    return {"object": "list", "data": [describe(service, tenant, entry) for entry in own_entries(service, tenant)]}


@router.post("", response_model=RegisteredPrefix)
async def register_prefix(body: PrefixRequest, request: Request, service: CurrentService, tenant: CurrentTenant) -> dict[str, Any]:
    """Run a prefix and keep it; registering again is no work."""
    engine, model = service.ready()
    tokens = await tokens_of(body, service)
    loops = model.config.default_loops if body.loops is None else body.loops
    namespace = tenant.namespace(body.namespace)
    tenant.begin(1)
    n_used = 0

    def begin() -> None:
        nonlocal n_used
        n_used = len(tokens)  # to be paid even by who leaves then

    try:
        with reserved_pin(service, tenant, tokens, loops, namespace) if body.pin else contextlib.nullcontext():
            n_cached = await unless_gone(request, engine.register(tenant.name, namespace, tokens, loops, pin=body.pin, on_begin=begin))
    except ClientGone:
        raise ServeError(499, "The client has left.") from None
    finally:
        tenant.end(1, n_used)
    note(request, prompt_tokens=len(tokens), cached_tokens=n_cached)
    for entry in own_entries(service, tenant):
        if entry.n_tokens == len(tokens) and entry.loops == loops and entry.namespace == namespace and list(entry.tokens) == tokens:
            return {**describe(service, tenant, entry), "cached_tokens": n_cached}
    raise ServeError(409, "The prefix was evicted as soon as it was built; the pool is too small for what is asked of it.", code="pool_full")


@router.delete("/{prefix_id}", response_model=Deleted)
async def delete_prefix(prefix_id: str, service: CurrentService, tenant: CurrentTenant) -> dict[str, Any]:
    """Drop one of the tenant's prefixes, pinned or not."""
    engine, _ = service.ready()
    for entry in own_entries(service, tenant):
        if id_of(entry) == prefix_id and await engine.discard(entry.namespace, entry.tokens.tolist(), entry.loops, entry.cache_window):
            return {"id": prefix_id, "object": "prefix", "deleted": True}
    raise ServeError(404, f"No prefix of yours has the id {prefix_id[:80]!r}.", code="prefix_not_found")


def own_entries(service: Service, tenant: Tenant) -> list[PrefixEntry]:
    """The pool's entries in the tenant's namespaces."""
    return [entry for entry in service.pool.entries() if tenant.owns(entry.namespace)]


def id_of(entry: PrefixEntry) -> str:
    """The id of a pool's entry."""
    return prefix_id(entry.namespace, entry.loops, entry.cache_window, entry.tokens)


def describe(service: Service, tenant: Tenant, entry: PrefixEntry) -> dict[str, Any]:
    """A prefix as its tenant sees it."""
    auto = service.engine.auto if service.engine is not None else None
    tokenizer = service.model.tokenizer if service.model is not None else None
    own = None if entry.namespace == tenant.name else str(entry.namespace)[len(tenant.name) + 1 :]
    return {
        "id": id_of(entry), "object": "prefix", "n_tokens": entry.n_tokens, "loops": entry.loops, "namespace": own, "pinned": entry.pinned,
        "automatic": auto is not None and auto.holds(entry.namespace, entry.loops, entry.tokens), "hits": entry.hits, "nbytes": entry.nbytes,
        "preview": "" if tokenizer is None else tokenizer.decode(entry.tokens[:PREVIEW_TOKENS].tolist(), skip_special_tokens=False),
    }  # fmt: skip


async def tokens_of(body: PrefixRequest, service: Service) -> list[int]:
    """The token ids that a prefix request names in one of three ways."""
    if sum(field is not None for field in (body.text, body.messages, body.tokens)) != 1:
        raise bad_request("Give exactly one of 'text', 'messages' and 'tokens'.")
    if body.tokens is not None:
        return body.tokens
    if body.text is not None:
        return await service.encode_text(body.text)
    assert body.messages is not None
    return await service.encode_chat(body.messages, reply=False)


@contextlib.contextmanager
def reserved_pin(service: Service, tenant: Tenant, tokens: list[int], loops: int, namespace: str) -> Iterator[None]:
    """Count a pin while it is built, or raise ServeError(403) where it would take more than the tenant may pin."""
    limit = tenant.limits.max_pinned_tokens
    if limit is None:
        yield
        return
    key = (namespace, loops, tuple(tokens))
    pins = {(entry.namespace, entry.loops, tuple(entry.tokens.tolist())) for entry in own_entries(service, tenant) if entry.pinned}
    pins.update(tenant.pinning)
    n = sum(len(held) for _, _, held in pins)
    if key not in pins and n + len(tokens) > limit:
        text = f"You may pin {limit} tokens: {n} are pinned, and these are {len(tokens)}. Delete a pinned prefix, or register this one without a pin."
        raise ServeError(403, text, code="pinned_tokens_exceeded", param="pin")
    tenant.pinning[key] += 1
    try:
        yield
    finally:
        tenant.pinning[key] -= 1
        if not tenant.pinning[key]:
            del tenant.pinning[key]
