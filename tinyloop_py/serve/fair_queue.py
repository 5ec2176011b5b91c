"""Requests that wait: in order of arrival for each tenant, taking turns between tenants."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue of queues. The tenant that was served last stands last in line."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[int, T]] = OrderedDict()  # in order of their turns; item by identity
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[T]:
        return (item for items in self._tenants.values() for item in items.values())

    def put(self, tenant: str, item: T, *, first: bool = False) -> None:
        """Append an item, or with `first` give it and its tenant back the place that `pop` took."""
        items = self._tenants.setdefault(tenant, OrderedDict())
        items[id(item)] = item
        self._n += 1
        if first:
            items.move_to_end(id(item), last=False)
            self._tenants.move_to_end(tenant, last=False)

    def next_up(self, skip: Collection[str] = ()) -> tuple[str, T] | None:
        """(tenant, item) that `pop` would take, leaving out the tenants to skip."""
        for tenant, items in self._tenants.items():
            if tenant not in skip:
                return tenant, next(iter(items.values()))
        return None

    def pop(self, skip: Collection[str] = ()) -> T | None:
        """Take the oldest item of the tenant whose turn it is; None where there is none."""
        found = self.next_up(skip)
        if found is None:
            return None
        tenant, item = found
        self.remove(tenant, item)
        if tenant in self._tenants:
            self._tenants.move_to_end(tenant)
        return item

    def count(self, tenant: str) -> int:
        """How many of a tenant wait."""
        return len(self._tenants.get(tenant, ()))

    def last_of_most(self) -> tuple[str, T]:
        """The tenant of whom most wait, and the one of its items that came last. There is one at least."""
        tenant, items = max(self._tenants.items(), key=lambda pair: len(pair[1]))
        return tenant, next(reversed(items.values()))

    def remove(self, tenant: str, item: T) -> bool:
        """Take an item out wherever it stands; False where it is not waiting."""
        items = self._tenants.get(tenant)
        if items is None or items.pop(id(item), None) is None:
            return False
        self._n -= 1
        if not items:
            del self._tenants[tenant]
        return True
