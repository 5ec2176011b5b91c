"""What the routes share: the model once it is loaded, its engine, and how text becomes tokens."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..model import Model
from ..pool import PrefixPool
from .chat import ChatFormat, common_prefix
from .engine import Engine
from .errors import ServeError, bad_request, context_exceeded, engine_down
from .metrics import Metrics
from .schemas import ChatMessage
from .settings import Settings
from .tenants import Tenants
from .token_text import TokenText

logger = logging.getLogger("tinyloop.serve")
T = TypeVar("T")
INLINE_CHARS = 2000  # longer texts are tokenised in a thread, so that the event loop goes on


class Service:
    """A served model, from loading to the end."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name = settings.model_name or Path(settings.model).stem
        self.tenants = Tenants.load(settings.key_file) if settings.key_file else Tenants()
        self.metrics = Metrics(self)
        self.model: Model | None = None
        self.pool = PrefixPool(settings.pool_capacity, max_bytes=settings.pool_bytes, eviction="lru")
        self.engine: Engine | None = None
        self.token_text: TokenText | None = None
        self.fingerprint = ""
        self.max_chars = 0
        self._chat: ChatFormat | None = None
        self._chat_problem = "this model file has no tokenizer"
        self._loading: asyncio.Task[None] | None = None
        self._load_error: str | None = None
        self._pool_file_refused = False
        self.listened = False  # set by the server; one that could not listen may share its pool file with the one that does

    # ---- life

    def begin_loading(self) -> None:
        """Load the model beside the event loop; until then /health says 503."""
        self._loading = asyncio.create_task(self._load(), name="tinyloop-load")

    async def loaded(self) -> None:
        """Wait until the model is loaded, or cannot be."""
        assert self._loading is not None
        await asyncio.wait((self._loading,))

    async def _load(self) -> None:
        s = self.settings
        try:
            options: dict[str, Any] = {"device": s.device, "threads": s.threads, "kv_mode": s.kv_mode, "kv_budget": s.kv_budget}
            model = await asyncio.to_thread(Model, s.model, s.max_seq_len, **options)
            self.model = model
            await asyncio.to_thread(self._prepare, model)
        except Exception as error:
            logger.exception("the model cannot be loaded")
            self._load_error = f"the model cannot be loaded: {error}"
            return
        engine = Engine(
            model, self.pool, max_running=s.max_running, max_queued=s.max_queued, prefill_rows=s.prefill_rows, auto_prefix=s.auto_prefix,
            window=s.window, deadline=s.deadline,
        )  # fmt: skip
        engine.on_turn = self.metrics.turn
        for entry in sorted(self.pool.entries(), key=lambda entry: entry.n_tokens):  # what a pool file held and nobody pinned
            if engine.auto is not None and not entry.pinned and entry.namespace is not None:
                n_shared = self.pool.match(model, entry.tokens[:-1], entry.loops, entry.cache_window, namespace=entry.namespace)
                engine.auto.add(entry.namespace.partition("/")[0], entry.namespace, entry.loops, entry.tokens, n_shared)
        self.engine = await engine.start()
        logger.info("ready", extra={"fields": {"model": self.name, "device": model.device, "prefixes": self.pool.size()}})

    def _prepare(self, model: Model) -> None:
        if self.settings.pool_file and os.path.exists(self.settings.pool_file):
            self._load_pool(model, self.settings.pool_file)
        self.fingerprint = "tl_" + hashlib.sha256(model.numerics_id.encode()).hexdigest()[:12]
        tokenizer = model.tokenizer
        if tokenizer is None:
            return
        self.token_text = TokenText(tokenizer)
        self.max_chars = model.max_seq_len * max(map(len, tokenizer.get_vocab()), default=1)
        if model.chat_template is None:
            self._chat_problem = "this model file has no chat template; use /v1/completions, or convert the model anew from a source that has one"
            return
        self._chat = ChatFormat(model.chat_template, tokenizer, model.stop_ids)

    def _load_pool(self, model: Model, path: str) -> None:
        """A pool file that does not fit is a warning: a cold start, not none. It may be another's, so it is not written over."""
        try:
            loader: Any = model  # a build without load_pool says so below
            saved = loader.load_pool(path)
            for entry in sorted(saved.entries(), key=lambda entry: entry.n_tokens):  # into a pool of these settings, not of those it was saved with
                key = model._pool_key(entry.loops, entry.cache_window, entry.namespace)
                self.pool._insert(key, entry.tokens, saved._get(key, entry.tokens).payload, entry.pinned)
            model._pools.add(self.pool)
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            self._pool_file_refused = True
            text = "the pool file is not used, and stays as it is: this run's pool is not saved; move the file away, or name another (%s)"
            logger.warning(text, error)

    async def close(self) -> None:
        """End the engine, save the pool and close the model."""
        if self._loading is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._loading
        if self.engine is not None:
            healthy = self.engine.alive
            await self.engine.close()
            if self.engine.failed:  # the model may be in the middle of a step
                return
            if self.settings.pool_file and healthy and self.listened and not self._pool_file_refused:
                await asyncio.to_thread(self._save_pool, self.settings.pool_file)
        if self.model is not None:
            await asyncio.to_thread(self.model.close)

    def _save_pool(self, path: str) -> None:
        try:
            pool: Any = self.pool
            pool.save(path)
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            logger.error("the pool is not saved: %s", error)

    # ---- state

    @property
    def status(self) -> tuple[str, str]:
        """("ok" | "loading" | "stopping" | "dead", why)."""
        if self._load_error is not None:
            return "dead", self._load_error
        if self.engine is None:
            return "loading", "the model is being loaded"
        if self.engine.draining:
            return "stopping", "the server is shutting down"
        problem = self.engine.problem
        return ("ok", "") if problem is None else ("dead", problem)

    def ready(self) -> tuple[Engine, Model]:
        """Engine and model, or ServeError(503)."""
        if self.engine is None or self.model is None:
            status, why = self.status
            raise ServeError(503, f"Not ready: {why}.", code=status, retry_after=2) if status == "loading" else engine_down(why)
        return self.engine, self.model

    def check_name(self, name: str | None) -> None:
        """Raise ServeError(404) where a request names another model."""
        if name is not None and name != self.name:
            raise ServeError(404, f"The model {name[:100]!r} does not exist; this server has {self.name!r}.", code="model_not_found", param="model")

    # ---- text

    def tokenizer(self) -> Any:
        """The model's tokenizer, or ServeError(400)."""
        _, model = self.ready()
        if model.tokenizer is None:
            raise bad_request("This model file has no tokenizer; give token ids.", "prompt")
        return model.tokenizer

    async def encode_text(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a plain text."""
        tokenizer = self.tokenizer()
        self._check_length(len(text))
        ids: list[int] = await self._beside(len(text), lambda: tokenizer.encode(text, add_special_tokens=special).ids)
        return ids

    async def encode_chat(self, messages: Sequence[ChatMessage], *, reply: bool = True) -> list[int]:
        """Token ids of a conversation, by the model's chat template."""
        chat, plain = self.chat(), [message.plain() for message in messages]
        n_chars = sum(len(message["content"]) for message in plain)
        self._check_length(n_chars)
        ids: list[int] = await self._beside(n_chars, lambda: chat.encode(plain, reply=reply))
        return ids

    def chat(self) -> ChatFormat:
        """The model's chat format, or ServeError(400)."""
        self.ready()
        if self._chat is None:
            raise bad_request(f"Chat is not possible: {self._chat_problem}.", "messages", "no_chat_template")
        return self._chat

    async def system_length(self, messages: Sequence[ChatMessage], tokens: Sequence[int]) -> int:
        """How many of a conversation's tokens its leading system messages make, where they stand on their own."""
        head = []
        for message in messages:
            if message.role not in ("system", "developer"):
                break
            head.append(message)
        if not head or len(head) == len(messages):
            return 0
        try:
            alone = await self.encode_chat(head, reply=False)
        except ServeError:  # a template that wants a user's message
            return 0
        n = common_prefix(alone, tokens)
        return n if n == len(alone) else 0

    def _check_length(self, n_chars: int) -> None:
        """Refuses a text that cannot fit, before it costs anything: no token has more characters than the longest."""
        _, model = self.ready()
        if n_chars > self.max_chars:
            raise context_exceeded(n_chars // max(1, self.max_chars // model.max_seq_len), 0, model.max_seq_len)

    async def _beside(self, n_chars: int, work: Any) -> Any:
        return work() if n_chars <= INLINE_CHARS else await asyncio.to_thread(work)
