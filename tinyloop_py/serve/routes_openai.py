"""OpenAI's routes: chat completions, completions, models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from .access import CurrentService, CurrentTenant, note
from .answer import Answer
from .errors import ServeError, bad_request, context_exceeded
from .requests import GenerationRequest, Sampling
from .responses import ChatCompletion, ChatShape, ErrorBody, TextCompletion, TextShape
from .schemas import ChatMessage, ChatRequest, CompletionRequest, Sampled
from .service import Service
from .strict_body import StrictRoute
from .tenants import Tenant

ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 401, 403, 404, 408, 409, 413, 415, 429, 500, 503, 504)}
STREAMED: dict[str, Any] = {
    "description": "The answer, or with `stream` its parts as server-sent events.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}

router = APIRouter(route_class=StrictRoute, prefix="/v1", tags=["OpenAI"], responses=ERRORS)
STARTED = int(time.time())


@router.post("/chat/completions", response_model=None, responses={200: {"model": ChatCompletion, **STREAMED}})
async def chat_completions(body: ChatRequest, request: Request, service: CurrentService, tenant: CurrentTenant) -> Response:
    """Answer a conversation."""
    begin_request(body, service)
    tokens = await service.encode_chat(body.messages)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    n_system = await service.system_length(body.messages, tokens) if service.settings.auto_prefix else 0
    asked = GenerationRequest(
        tokens, room(service, len(tokens), max_tokens, service.settings.default_max_tokens),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None, **common(body, service, tenant),
        keep_first=n_system, keep_turn=next_turn(service, body.messages),
    )  # fmt: skip
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    note_prompt(request, service, body.messages)
    shape = ChatShape(service.name, service.fingerprint, service_tokens(service), asked.logprobs)
    answer = Answer(service, tenant, request, shape)
    answer.submit([asked])
    return await answer.respond(bool(body.stream), include_usage(body))


@router.post("/completions", response_model=None, responses={200: {"model": TextCompletion, **STREAMED}})
async def completions(body: CompletionRequest, request: Request, service: CurrentService, tenant: CurrentTenant) -> Response:
    """Continue texts, or token ids."""
    begin_request(body, service)
    if body.echo and body.logprobs is not None:
        raise bad_request("Log-probabilities of the prompt are not supported: set echo or logprobs, not both.", "echo", "unsupported_parameter")
    prompts = split_prompts(body.prompt)
    check_count(len(prompts), service, tenant)
    encoded = [prompt if isinstance(prompt, list) else await service.encode_text(prompt) for prompt in prompts]
    shared = common(body, service, tenant)
    asked = [
        GenerationRequest(tokens, room(service, len(tokens), body.max_tokens, 16, most=16), logprobs=body.logprobs, **shared) for tokens in encoded
    ]
    echoes = [prompt if isinstance(prompt, str) else await service.decode(prompt) for prompt in prompts] if body.echo else []
    note_prompt(request, service, prompts)
    answer = Answer(service, tenant, request, TextShape(service.name, service.fingerprint, service_tokens(service), body.logprobs), echoes)
    answer.submit(asked)
    return await answer.respond(bool(body.stream), include_usage(body))


@router.get("/models")
async def models(service: CurrentService, tenant: CurrentTenant) -> dict[str, Any]:
    """The model that is served."""
    return {"object": "list", "data": [describe_model(service)]}


@router.get("/models/{name:path}")
async def model(name: str, service: CurrentService, tenant: CurrentTenant) -> dict[str, Any]:
    """One model."""
    service.check_name(name)
    return describe_model(service)


def describe_model(service: Service) -> dict[str, Any]:
    """The model object; depths and context are tinyloop's own fields."""
    body: dict[str, Any] = {"id": service.name, "object": "model", "created": STARTED, "owned_by": "tinyloop"}
    if service.model is not None:
        config = service.model.config
        body |= {"max_model_len": service.model.max_seq_len, "default_loops": config.default_loops, "trained_loops": config.trained_loops}
        body |= {"max_loops": config.max_loops, "chat": service.model.chat_template is not None}
    return body


def begin_request(body: Sampled, service: Service) -> None:
    """Refuse at once what cannot be served."""
    service.ready()
    service.check_name(body.model)
    for field, harmless in body.UNSUPPORTED.items():
        if getattr(body, field) not in harmless:
            raise bad_request(f"Unsupported parameter: '{field}' is not supported with this model.", field, "unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise bad_request("The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options")


def include_usage(body: Sampled) -> bool:
    """Whether a streamed answer ends with its usage."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def service_tokens(service: Service) -> Any:
    """Texts of tokens; a model without a tokenizer cannot get here."""
    service.tokenizer()
    return service.token_text


def room(service: Service, n_prompt: int, asked: int | None, default: int, most: int | None = None) -> int:
    """max_tokens of a request: what was asked, or what there is room for up to a default."""
    _, model = service.ready()
    if asked is not None:
        return asked
    left = model.max_seq_len - n_prompt
    if left < 1:
        raise context_exceeded(n_prompt, 0, model.max_seq_len)
    return min(left, default)


def common(body: Sampled, service: Service, tenant: Tenant) -> dict[str, Any]:
    """Fields of a GenerationRequest that both kinds of completions share."""
    _, model = service.ready()
    vocab_size = model.config.vocab_size
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    ids = tuple(body.stop_token_ids or ())
    if any(token >= vocab_size for token in ids):
        raise bad_request(f"stop_token_ids: expected ids from 0 to {vocab_size - 1}.", "stop_token_ids")
    top_p = 1.0 if body.top_p is None else body.top_p
    sampling = Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=1 if top_p == 0 else (body.top_k or 0), top_p=1.0 if top_p == 0 else top_p, min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0, logit_bias=bias_of(body.logit_bias, vocab_size),
        seed=None if body.seed is None else body.seed % 2**64,
    )  # fmt: skip
    if body.ignore_eos:
        stop_tokens: tuple[int, ...] | None = ids
    else:
        stop_tokens = None if not ids else (*ids, *model.stop_ids)
    return {
        "loops": body.loops, "n": body.n or 1, "sampling": sampling, "stop": stop, "stop_tokens": stop_tokens, "tenant": tenant.name,
        "namespace": tenant.namespace(body.namespace),
    }  # fmt: skip


def bias_of(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    """logit_bias with ids for keys."""
    if not bias:
        return None
    found = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise bad_request(f"logit_bias: {key[:40]!r} is no token id; expected 0 to {vocab_size - 1}.", "logit_bias")
        found[int(key)] = value
    return found


def split_prompts(prompt: Any) -> list[Any]:
    """A prompt or a list of them, as a list of texts and lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("The prompt is empty; give at least one token.", "prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def check_count(n_prompts: int, service: Service, tenant: Tenant) -> None:
    """Refuse more prompts than can wait at a time: trying again would never help."""
    limit, own = service.settings.max_queued, tenant.limits.max_requests
    most = limit if own is None else min(limit, own)
    if n_prompts > most:
        raise bad_request(
            f"{n_prompts} prompts are more than the {most} that one request may have here; send them in several.", "prompt", "too_many_prompts"
        )


def next_turn(service: Service, messages: Sequence[ChatMessage]) -> Any:
    """What the next prompt of this conversation begins with, given this answer's text: what an automatic prefix keeps."""
    if not service.settings.auto_prefix:
        return None
    chat, plain = service.chat(), [message.plain() for message in messages]

    def tokens(text: str) -> list[int]:
        try:
            return chat.encode([*plain, {"role": "assistant", "content": text}], reply=False)
        except ServeError:  # a template that lets no conversation end so
            return []

    return tokens


def note_prompt(request: Request, service: Service, prompt: Any) -> None:
    """The prompt goes into the log only where the operator asked for it."""
    if service.settings.log_prompts:
        note(request, prompt=[item.model_dump() if isinstance(item, ChatMessage) else item for item in prompt])
