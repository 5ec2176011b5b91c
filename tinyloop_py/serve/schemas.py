"""What requests may hold. Fields, names and ranges are OpenAI's; those that they lack stand under "tinyloop's own"."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

T = TypeVar("T")
ListOf = Annotated[
    list[T], Field(fail_fast=True)
]  # the first fault ends it: a small body of bad elements would otherwise cost seconds and a gigabyte
INT32 = 2**31 - 1
Count = Annotated[int, Field(ge=0, le=INT32)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
TokenIds = Annotated[ListOf[TokenId], Field(max_length=1 << 20)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Namespace = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9._:-]*$")]
Prompts = Annotated[ListOf[str], Field(min_length=1, max_length=128)] | Annotated[ListOf[TokenIds], Field(min_length=1, max_length=128)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class Strict(BaseModel):
    """Types are not converted, unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class TextPart(Strict):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    reasoning_content: str | None = None

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it."""
        content = self.content
        text = "" if content is None else content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text, **({"name": self.name} if self.name else {})}


class StreamOptions(Strict):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(Strict):
    """What chat and plain completions have in common."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"frequency_penalty": (None, 0), "presence_penalty": (None, 0)}

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Fraction | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: StopString | Annotated[ListOf[StopString], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]], Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    user: str | None = None
    # tinyloop's own
    loops: Annotated[int, Field(ge=1, le=INT32, description="Depth: how often the model's core runs per token.")] | None = None
    top_k: Count | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    stop_token_ids: Annotated[ListOf[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    namespace: Annotated[Namespace | None, Field(validation_alias=AliasChoices("namespace", "cache_salt"))] = None


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Sampled.UNSUPPORTED, "tools": (None, []), "tool_choice": (None, "none", "auto"), "functions": (None, []),
        "function_call": (None, "none", "auto"), "response_format": (None, {"type": "text"}), "modalities": (None, ["text"]), "audio": (None,),
        "prediction": (None,), "web_search_options": (None,),
    }  # fmt: skip

    messages: Annotated[ListOf[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Taken, and without effect here
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    # Refused where they ask for something
    tools: ListOf[Any] | None = None
    tool_choice: Any = None
    functions: ListOf[Any] | None = None
    function_call: Any = None
    response_format: Any = None
    modalities: ListOf[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {**Sampled.UNSUPPORTED, "suffix": (None, ""), "best_of": (None, 1)}

    prompt: str | TokenIds | Prompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=0, le=128)] | None = None


class PrefixRequest(Strict):
    """POST /v1/prefixes: exactly one of text, messages and tokens."""

    text: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[ListOf[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    tokens: Annotated[TokenIds, Field(min_length=1)] | None = None
    loops: Annotated[int, Field(ge=1, le=INT32)] | None = None
    pin: bool = False
    namespace: Namespace | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: exactly one of text and messages."""

    model: str | None = None
    text: str | None = Field(default=None, validation_alias=AliasChoices("text", "prompt", "content"))
    messages: Annotated[ListOf[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False
