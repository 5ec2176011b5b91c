"""What the routes share: the model once it is loaded, its engine, and how text becomes tokens."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..model import Model
from ..pool import PrefixPool
from ..pool_report import PrefixEntry
from .beside import beside, decode, encode
from .chat import ChatFormat, common_prefix
from .engine import Engine
from .errors import ServeError, bad_request, context_exceeded, engine_down
from .metrics import Metrics
from .pool_file import PoolFile
from .schemas import ChatMessage
from .settings import Settings
from .tenants import Tenants
from .token_text import TokenText

logger = logging.getLogger("tinyloop.serve")


class Service:
    """A served model, from loading to the end."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name = settings.model_name or Path(settings.model).stem
        self.tenants = Tenants.load(settings.key_file) if settings.key_file else Tenants()
        self.metrics = Metrics(self)
        self.model: Model | None = None
        self.pool = self._new_pool()
        self.pool_file = PoolFile(settings.pool_file) if settings.pool_file else None
        self.engine: Engine | None = None
        self.token_text: TokenText | None = None
        self.fingerprint = ""
        self.max_chars = 0
        self._chat: ChatFormat | None = None
        self._chat_problem = "this model file has no tokenizer"
        self._loading: asyncio.Task[None] | None = None
        self._load_error: str | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self.listened = False  # set by the server; one that could not listen may share its pool file with the one that does
        self.lost_pool = False  # it was to be saved, and could not be

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
            automatic = await asyncio.to_thread(self._load_pool, model)
            await asyncio.to_thread(self._prepare_text, model)
        except Exception as error:
            logger.exception("the model cannot be loaded")
            self._load_error = f"the model cannot be loaded: {error}"
            return
        engine = Engine(
            model, self.pool, max_running=s.max_running, max_queued=s.max_queued, prefill_rows=s.prefill_rows, auto_prefix=s.auto_prefix,
            window=s.window, deadline=s.deadline,
        )  # fmt: skip
        engine.on_turn = self.metrics.turns.add
        if engine.auto is not None:
            engine.auto.restore(automatic)
        else:
            for entry in automatic:
                self.pool.discard(model, entry.tokens, entry.loops, entry.cache_window, namespace=entry.namespace)
        self.engine = await engine.start()
        self.on_ready()
        logger.info("ready", extra={"fields": {"model": self.name, "device": model.device, "prefixes": self.pool.size()}})

    def _new_pool(self) -> PrefixPool:
        return PrefixPool(self.settings.pool_capacity, max_bytes=self.settings.pool_bytes, eviction="lru")

    def _prepare_text(self, model: Model) -> None:
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

    def _load_pool(self, model: Model) -> list[PrefixEntry]:
        """Takes the pool from its file and gives the automatic ones of its entries. A file that does not fit is a warning: a cold start, not none."""
        if self.pool_file is None:
            return []
        pool = self._new_pool()
        try:
            automatic = self.pool_file.load(model, pool)
        except (OSError, ValueError, RuntimeError) as error:
            text = "the pool file is not used, and stays as it is: this run's pool is not saved; move the file away, or name another (%s)"
            logger.warning(text, str(error))  # the error itself would hold what was loaded
            return []
        self.pool = pool
        return automatic

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
            if self.pool_file is not None and healthy and self.listened and not self.pool_file.refused:
                self.lost_pool = not await asyncio.to_thread(self._save_pool, self.engine, self.pool_file)
        if self.model is not None:
            await asyncio.to_thread(self.model.close)

    def _save_pool(self, engine: Engine, file: PoolFile) -> bool:
        if engine.auto is not None:
            engine.auto.sweep()
        return file.save(self.pool, [] if engine.auto is None else engine.auto.ids())

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
        return await beside(len(text), lambda: encode(tokenizer, text, special=special))

    async def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of token ids."""
        tokenizer = self.tokenizer()
        return await beside(len(tokens), lambda: decode(tokenizer, tokens, skip_special=skip_special))

    async def encode_chat(self, messages: Sequence[ChatMessage], *, reply: bool = True) -> list[int]:
        """Token ids of a conversation, by the model's chat template."""
        chat, plain = self.chat(), [message.plain() for message in messages]
        n_chars = sum(len(message["content"]) for message in plain)
        self._check_length(n_chars)
        return await beside(n_chars, lambda: chat.encode(plain, reply=reply))

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
