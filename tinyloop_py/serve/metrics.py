"""Prometheus metrics: counters in tokens and requests; rates are left to whoever reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from .service import Service

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("tinyloop_requests", "Requests that were answered.", ("route", "status"), registry=self.registry)
        self.dropped = Counter("tinyloop_dropped_connections", "Without a request, or with too slow a reader.", ("reason",), registry=self.registry)
        self.prompt_tokens = Counter("tinyloop_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.cached_tokens = Counter("tinyloop_cached_tokens", "Tokens of prompts that a prefix spared.", registry=self.registry)
        self.generated_tokens = Counter("tinyloop_generation_tokens", "Tokens that were drawn.", registry=self.registry)
        self.cancelled = Counter("tinyloop_cancelled_requests", "Requests whose client left.", registry=self.registry)
        self.first_token = Histogram(
            "tinyloop_time_to_first_token_seconds", "From a request to its first token.", buckets=SECONDS, registry=self.registry
        )
        self.duration = Histogram("tinyloop_request_seconds", "From a request to its end.", buckets=SECONDS, registry=self.registry)
        self.turns = Turns()
        self.registry.register(self.turns)
        self.registry.register(_State(service))

    def count_dropped(self, reason: str) -> None:
        """A connection was dropped."""
        self.dropped.labels(reason).inc()

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class Turns:
    """The engine's turns, a thousand a second and more: counted by the event loop alone, which needs no lock for it."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)  # by the bound that it stays within, and those beyond the last
        self._seconds = 0.0
        self._n_rows = 0

    def add(self, seconds: float, n_rows: int) -> None:
        """The engine took a turn."""
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._seconds += seconds
        self._n_rows += n_rows

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        buckets = list(zip([*map(str, map(float, SECONDS)), "+Inf"], accumulate(self._counts), strict=True))
        yield HistogramMetricFamily("tinyloop_turn_seconds", "Of the engine.", buckets=buckets, sum_value=self._seconds)
        yield CounterMetricFamily("tinyloop_output_steps", "Steps of outputs; over the turns, how many share one.", value=self._n_rows)


class _State:
    """Reads what is true now, when it is asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        service = self._service
        yield GaugeMetricFamily("tinyloop_up", "1 where requests are answered.", value=service.status[0] == "ok")
        if service.engine is None or service.model is None:
            return
        yield GaugeMetricFamily("tinyloop_requests_running", "Requests at work.", value=service.engine.n_running)
        yield GaugeMetricFamily("tinyloop_requests_waiting", "Requests in the queue.", value=service.engine.n_waiting)
        yield GaugeMetricFamily("tinyloop_kv_bytes", "Bytes of KV pages in use.", value=service.model.kv_nbytes)
        yield GaugeMetricFamily("tinyloop_pool_entries", "Prefixes in the pool.", value=service.pool.size())
        yield GaugeMetricFamily("tinyloop_pool_tokens", "Tokens of all prefixes.", value=service.pool.total_cached_tokens())
        yield GaugeMetricFamily("tinyloop_pool_bytes", "Bytes of all prefixes, shared pages once.", value=service.pool.nbytes)
        stats = service.pool.stats()
        for name in ("queries", "hits", "full_hits", "misses", "insertions", "evictions", "refusals", "fallbacks"):
            yield CounterMetricFamily(f"tinyloop_pool_{name}", f"{name} of the pool, as PoolStats counts them.", value=getattr(stats, name))
