"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from .access import CurrentService, CurrentTenant
from .errors import bad_request
from .routes_openai import ERRORS
from .schemas import DetokenizeRequest, TokenizeRequest
from .strict_body import StrictRoute

router = APIRouter(route_class=StrictRoute, tags=["tokens"], responses=ERRORS)


class Tokens(BaseModel):
    """Token ids."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(BaseModel):
    """A text."""

    text: str
    prompt: str


@router.post("/tokenize", response_model=Tokens)
async def tokenize(body: TokenizeRequest, service: CurrentService, tenant: CurrentTenant) -> dict[str, Any]:
    """Token ids of a text, or of messages by the chat template."""
    _, model = service.ready()
    service.check_name(body.model)
    if (body.text is None) == (body.messages is None):
        raise bad_request("Give exactly one of 'text' and 'messages'.")
    if body.text is not None:
        tokens = await service.encode_text(body.text, special=body.add_special_tokens)
    else:
        tokens = await service.encode_chat(body.messages or [], reply=body.add_generation_prompt)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": model.max_seq_len}


@router.post("/detokenize", response_model=Text)
async def detokenize(body: DetokenizeRequest, service: CurrentService, tenant: CurrentTenant) -> dict[str, Any]:
    """The text of token ids."""
    _, model = service.ready()
    service.check_name(body.model)
    if any(token >= model.config.vocab_size for token in body.tokens):
        raise bad_request(f"tokens: expected ids from 0 to {model.config.vocab_size - 1}.", "tokens")
    text = await service.decode(body.tokens, skip_special=body.skip_special_tokens)
    return {"text": text, "prompt": text}
