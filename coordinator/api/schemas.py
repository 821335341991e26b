"""The bodies of `/v1/chat/completions` and `/v1/completions`, checked field by field. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from titan.common.errors import InvalidRequest
from titan.coordinator.api.fields import check_other_fields
from titan.coordinator.api.forms import AnswerForm, read_response_format
from titan.coordinator.api.messages import Message, read_messages
from titan.coordinator.api.tools import ToolChoice, Tools, read_choice, read_tools
from titan.coordinator.generation import Sampling

__all__ = ["ChatRequest", "CommonFields", "CompletionRequest", "Prompt", "StreamOptions", "validate"]

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_PROMPTS = 16
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 16
MAX_BIASES = 1024

Prompt = str | tuple[int, ...]
Object = dict[str, Any]  # in the OpenAPI page; the validators say more
Objects = list[Object]
Prompts = str | list[str] | list[int] | list[list[int]]


def _stop(value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise _problem("should be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise _problem(f"has {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed")
    if not all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise _problem(f"should have strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt or a list of them, each a string or a list of token ids."""
    many = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = value if many else [value]
    if len(prompts) > MAX_PROMPTS:
        raise _problem(f"has {len(prompts)} prompts, at most {MAX_PROMPTS} are allowed")
    return tuple(_prompt(prompt) for prompt in prompts)


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    raise _problem("should be a string, a list of token ids, or a list of either")


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """OpenAI's {"token id": bias}."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise _problem("should be an object of token ids and biases")
    if len(value) > MAX_BIASES:
        raise _problem(f"has {len(value)} tokens, at most {MAX_BIASES} are allowed")
    biases: list[tuple[int, float]] = []
    for token, bias in value.items():
        if not token.isascii() or not token.isdecimal() or len(token) > 10:
            raise _problem(f"has the key {token[:40]!r}, which is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise _problem(f"has a bias for token {token} that is not a number in -100..100")
        biases.append((int(token), float(bias)))
    return tuple(biases)


def _problem(reason: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{reason}", {"reason": reason})


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


Biases = Annotated[
    tuple[tuple[int, float], ...], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float] | None)
]
Choice = Annotated[ToolChoice, PlainValidator(read_choice, json_schema_input_type=str | Object | None)]
Form = Annotated[AnswerForm, PlainValidator(read_response_format, json_schema_input_type=Object | None)]


class CommonFields(BaseModel):
    """What both endpoints take. A field that is null counts as left out."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # -1, as 0: all
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=4)] | None = None
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float] | None)
    ] = ()
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop, json_schema_input_type=str | list[str] | None)] = ()
    return_token_ids: bool | None = None  # Titan's own: choices carry `token_ids`

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.logit_bias,
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(CommonFields):
    messages: Annotated[tuple[Message, ...], PlainValidator(read_messages, json_schema_input_type=Objects)]
    tools: Annotated[Tools, PlainValidator(read_tools, json_schema_input_type=Objects | None)] = ()
    tool_choice: Annotated[ToolChoice, PlainValidator(read_choice, json_schema_input_type=str | Object | None)] = (
        ToolChoice()
    )
    response_format: Annotated[
        AnswerForm, PlainValidator(read_response_format, json_schema_input_type=Object | None)
    ] = AnswerForm()
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def answer_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives a token, or None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(CommonFields):
    prompt: Annotated[
        tuple[Prompt, ...],
        PlainValidator(_prompts, json_schema_input_type=Prompts),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


Body = TypeVar("Body", bound=BaseModel)


def validate(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """`fields` as a checked request.

    Raises:
        InvalidRequest: a field is missing, of the wrong type, out of bounds, unknown or unsupported; `param` names it.
    """
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        context = first.get("ctx", {})
        param = _path(first["loc"]) + context.get("where", "")
        reason = context.get("reason", first["msg"])
        raise InvalidRequest(f"{param} {reason[:1].lower()}{reason[1:]}", param=param) from None
    check_other_fields(body.model_extra or {})
    if isinstance(body, CommonFields) and body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream", "send stream: true", param="stream_options")
    if isinstance(body, ChatRequest) and body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", "send logprobs: true", param="top_logprobs")
    return body


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> "messages[0].content", without the names of union members."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
    return path
