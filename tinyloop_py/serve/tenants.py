"""Who may ask, and how much: API keys from a file, one namespace and one set of limits for each tenant."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..atomic_file import check_replaceable
from ..strict_json import load_object
from .errors import ServeError
from .folder_lock import locked_folder
from .rates import Allowance

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # no slash: it separates the tenant from its own namespaces
HASH = re.compile(r"sha256:[0-9a-f]{64}")
ANONYMOUS = "anonymous"


@dataclass(frozen=True)
class TenantLimits:
    """None is no limit."""

    max_requests: int | None = None  # at work and waiting together
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs; cached ones count
    max_pinned_tokens: int | None = 65536


@dataclass
class Tenant:
    """One customer of the server."""

    name: str
    limits: TenantLimits = field(default_factory=TenantLimits)
    operator: bool = False  # may read /metrics, which tells of all tenants
    n_open: int = 0
    pinning: Counter[tuple[str | None, int, tuple[int, ...]]] = field(default_factory=Counter)  # pins that are being built: namespace, loops, tokens
    requests: Allowance | None = None
    tokens: Allowance | None = None

    def __post_init__(self) -> None:
        if self.limits.requests_per_minute is not None:
            self.requests = Allowance(self.limits.requests_per_minute)
        if self.limits.tokens_per_minute is not None:
            self.tokens = Allowance(self.limits.tokens_per_minute)

    def namespace(self, own: str | None = None) -> str:
        """The pool's namespace of this tenant, or one of the namespaces that it makes for itself."""
        return f"{self.name}/{own}" if own else self.name

    def owns(self, namespace: str | None) -> bool:
        """Whether a pool's namespace is this tenant's."""
        return namespace is not None and (namespace == self.name or namespace.startswith(self.name + "/"))

    def begin(self, n_requests: int) -> None:
        """Count requests in, or raise ServeError(429)."""
        limit = self.limits.max_requests
        if limit is not None and self.n_open + n_requests > limit:
            raise ServeError(429, f"{limit} requests of yours are open already; wait for one to end.", code="too_many_requests", retry_after=1)
        for allowance, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            if allowance is not None and (wait := allowance.wait_seconds()) > 0:
                text = f"Your limit of {allowance.per_minute} {what} per minute is reached; try again in {math.ceil(wait)} s."
                raise ServeError(429, text, code="rate_limit_exceeded", retry_after=wait)
        if self.requests is not None:
            self.requests.take(n_requests)
        self.n_open += n_requests

    def end(self, n_requests: int, n_tokens: int) -> None:
        """Count requests out, and the tokens that they used."""
        self.n_open -= n_requests
        if self.tokens is not None:
            self.tokens.take(n_tokens)


class Tenants:
    """All tenants; without a key file there is one, and everybody is it."""

    def __init__(self, tenants: dict[str, Tenant] | None = None) -> None:
        self._by_hash = tenants
        self.anonymous = Tenant(ANONYMOUS, TenantLimits(max_pinned_tokens=None), operator=True)

    @property
    def need_keys(self) -> bool:
        """Whether a request needs a key."""
        return self._by_hash is not None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tenants:
        """Read a key file; ValueError names what is wrong with it."""
        with open(path, "rb") as file:
            fields = load_object(file.read(), f"key file {os.fspath(path)}")
        listed = fields.pop("tenants", None)
        if fields or not isinstance(listed, list) or not listed:
            raise ValueError(f"key file {os.fspath(path)}: expected an object with a list 'tenants' and nothing else")
        by_hash: dict[str, Tenant] = {}
        names: set[str] = set()
        for item in listed:
            tenant, hashes = _parse(item, os.fspath(path))
            if tenant.name in names or any(h in by_hash for h in hashes):
                raise ValueError(f"key file {os.fspath(path)}: tenant {tenant.name!r}: its name or one of its keys appears twice")
            names.add(tenant.name)
            by_hash.update(dict.fromkeys(hashes, tenant))
        return cls(by_hash)

    def find(self, authorization: str | None) -> Tenant:
        """The tenant of an Authorization header, or ServeError(401)."""
        if self._by_hash is None:
            return self.anonymous
        scheme, _, key = (authorization or "").partition(" ")
        tenant = self._by_hash.get(hash_key(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            text = "Incorrect API key provided." if authorization else "No API key provided; send the header 'Authorization: Bearer KEY'."
            raise ServeError(401, text, code="invalid_api_key")
        return tenant


def new_key() -> str:
    """A fresh API key of 256 random bits; what is stored is its hash."""
    return "tl-" + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What stands in a key file. Keys are random and long, so a plain SHA-256 cannot be guessed back."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def add_key(path: str | os.PathLike[str], name: str, settings: dict[str, Any]) -> str:
    """Add a key for a tenant to a key file, made where it is missing; returns the key, which is nowhere else."""
    if not NAME.fullmatch(name):
        raise ValueError(f"tenant name {name!r}: expected 1 to 64 letters, digits, '.', '_' and '-'")
    check_replaceable(path)
    target = os.path.realpath(path)  # a link keeps pointing where it does
    with locked_folder(os.path.dirname(target)):
        return _add_key(target, name, settings)


def _add_key(path: str, name: str, settings: dict[str, Any]) -> str:
    fields: dict[str, Any] = {"tenants": []}
    old = None
    if os.path.exists(path):
        Tenants.load(path)  # so that a broken file is not written over
        old = os.stat(path)
        with open(path, "rb") as file:
            fields = load_object(file.read(), f"key file {path}")
    key = new_key()
    tenant = next((item for item in fields["tenants"] if item["name"] == name), None)
    if tenant is None:
        tenant = {"name": name, "keys": []}
        fields["tenants"].append(tenant)
    tenant.update(settings)
    tenant["keys"].append(hash_key(key))
    _parse(tenant, path)  # what could not be loaded is not written
    temporary = f"{path}.{secrets.token_hex(6)}.new"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            if old is not None:  # whoever could read it still can
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            file.write(json.dumps(fields, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return key


def _parse(item: Any, path: str) -> tuple[Tenant, list[str]]:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str) or not NAME.fullmatch(item["name"]):
        raise ValueError(f"key file {path}: a tenant needs a 'name' of 1 to 64 letters, digits, '.', '_' and '-'")
    fields, name = dict(item), item["name"]
    del fields["name"]
    hashes, operator = fields.pop("keys", None), fields.pop("operator", False)
    if not isinstance(hashes, list) or not all(isinstance(h, str) and HASH.fullmatch(h) for h in hashes):
        raise ValueError(f"key file {path}: tenant {name!r}: 'keys' must be a list of 'sha256:' and 64 hexadecimal digits")
    if not isinstance(operator, bool):
        raise ValueError(f"key file {path}: tenant {name!r}: 'operator' must be true or false")
    known = set(TenantLimits.__dataclass_fields__)
    for key, value in fields.items():
        if key not in known:
            raise ValueError(f"key file {path}: tenant {name!r}: {key!r} is not one of {', '.join(sorted(known))}")
        least = 0 if key == "max_pinned_tokens" else 1
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"key file {path}: tenant {name!r}: {key} is {value!r}, expected a whole number from {least} on, or null")
    return Tenant(name, TenantLimits(**fields), operator), hashes
