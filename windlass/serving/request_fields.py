"""Base of the request models: every field of a request has an effect, is harmless, or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError

from windlass.base.text import nearest_name, one_line
from windlass.inference.sampling_params import SamplingParams, StructuredOutputsParams
from windlass.inference.scheduler import ServiceLevel
from windlass.serving.api_errors import ApiError

_ANY = object()

_HARMLESS: dict[str, tuple[Any, ...] | object] = {
    "user": _ANY,
    "metadata": _ANY,
    "safety_identifier": _ANY,
    "prompt_cache_key": _ANY,
    "prompt_cache_options": _ANY,  # the prefix cache needs no options
    "prompt_cache_retention": _ANY,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "spaces_between_special_tokens": (True,),
    "include_reasoning": (True,),  # a model's reasoning is part of its text
    "guided_decoding_backend": _ANY,  # any backend allows the same texts
}

_REFUSED = {
    "audio": "the server generates text only",
    "chat_template": "the template is chosen at start by --chat-template",
    "documents": "pass them in chat_template_kwargs, if the template reads them",
    "enable_thinking": "pass it in chat_template_kwargs",
    "extra_body": "send its fields beside the others",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "include_reasoning": "the reasoning is part of the text",
    "kv_transfer_params": "each server computes its own keys and values",
    "length_penalty": "beam search is not served",
    "logits_processors": "the server runs no code of requests",
    "mm_processor_kwargs": "the server takes text only",
    "modalities": "the server generates text only",
    "moderation": "the server moderates nothing",
    "prediction": "leave it out",
    "reasoning_effort": "pass the template's own switch in chat_template_kwargs",
    "service_tier": "leave it out",
    "store": "the server keeps no answers; write false",
    "thinking": "pass the template's own switch in chat_template_kwargs",
    "thinking_token_budget": "pass the template's own switch in chat_template_kwargs",
    "use_beam_search": "beam search is not served",
    "verbosity": "leave it out",
    "vllm_xargs": "the server runs no code of requests",
    "web_search_options": "the server searches nothing",
}

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")

Model = TypeVar("Model", bound="RequestModel")
Value = TypeVar("Value")


class _UpToFirstError:
    """Marker that ends the validation of a container at the first error. pydantic would keep an error for each element.

    pydantic's own `FailFast` has no hash, which unions need.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> dict[str, Any]:
        return {**handler(source), "fail_fast": True}


ListField = Annotated[list[Value], _UpToFirstError()]
DictField = Annotated[dict[str, Value], _UpToFirstError()]


class RequestModel(BaseModel):
    """Fields of a request. Types are strict: `"1"` is not a number, and `true` is not an integer.

    Attributes:
        harmless: fields without effect, each with its accepted values: any value, or only the default of other servers.
        refused: fields that would change the answer and have no effect here, each with the remedy.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
    harmless: ClassVar[Mapping[str, tuple[Any, ...] | object]] = _HARMLESS
    refused: ClassVar[Mapping[str, str]] = _REFUSED

    @classmethod
    def parse(cls: type[Model], data: Mapping[str, Any], parents: tuple[str, ...] = ()) -> Model:
        """Return the validated fields of a JSON object.

        Args:
            parents: names of the enclosing fields, from the outermost one.

        Raises:
            ApiError: a field is unknown, refused, of another type or missing; the error names the field.
        """
        known: dict[str, Any] = {}
        for name, value in data.items():
            if _has_effect(name, value, cls, parents):
                part = _part_model(cls, name)
                nests = part is not None and isinstance(value, Mapping)
                known[name] = part.parse(value, (*parents, name)) if part is not None and nests else value
        try:
            return cls.model_validate(known)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
            # report only the first problem, because each member of a union reports its own
            path = (*parents, *(str(part) for part in problems[0]["loc"]))
            place, field = ".".join(path), path[0] if path else None
            message = f"{place}: {problems[0]['msg']}"
            if problems[0]["type"] != "missing":
                message += f" (it is {one_line(repr(problems[0]['input']), 100)})"
            raise ApiError(400, message, parameter=field) from error


def _part_model(model: type[RequestModel], name: str) -> type[RequestModel] | None:
    """Return the `RequestModel` of a field that takes an object with checked fields; None for other fields."""
    annotation = model.model_fields[name].annotation
    for kind in get_args(annotation) or (annotation,):
        if isinstance(kind, type) and issubclass(kind, RequestModel):
            return kind
    return None


def _has_effect(name: str, value: Any, model: type[RequestModel], parents: tuple[str, ...]) -> bool:
    """Return True for a field of the model, and False for a harmless field.

    Raises:
        ApiError: the field is refused or unknown.
    """
    if name in model.model_fields:
        return True
    allowed = model.harmless.get(name)
    if allowed is _ANY or (value is None and (allowed is not None or name in model.refused)):
        return False
    if isinstance(allowed, tuple) and any(value == one and type(value) is type(one) for one in allowed):
        return False
    place, shown = one_line(".".join((*parents, name)), 80), one_line(repr(value), 100)
    field = parents[0] if parents else place
    if name in model.refused or allowed is not None:
        reason = model.refused.get(name, "leave it out")
        raise ApiError(
            400, f"{place} = {shown} is not supported: {reason}", parameter=field, code="unsupported_parameter"
        )
    near = nearest_name(name, model.model_fields)
    hint = f"; did you mean {near}?" if near else "; leave it out"
    raise ApiError(400, f"unknown field {place!r}{hint}", parameter=field, code="unknown_parameter")


class StreamOptions(RequestModel):
    """Options of a streamed answer.

    Attributes:
        include_usage: send the number of tokens as the last event.
        continuous_usage_stats: send the number of tokens so far with every event.
    """

    harmless: ClassVar = {"include_obfuscation": (False, True)}
    refused: ClassVar = {}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputsField(RequestModel):
    """Constraint of the text, as the object in vLLM's field `structured_outputs`."""

    harmless: ClassVar = {"disable_fallback": (False, True)}  # there is only one compiler, so no fallback
    refused: ClassVar = {"structural_tag": "use grammar"}

    json_: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: ListField[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> StructuredOutputsParams:
        """Return the constraint of the JSON object of `structured_outputs`."""
        known = {"json_" if name == "json" else name: value for name, value in data.items()}
        field = cls.parse(known, ("structured_outputs",))
        return StructuredOutputsParams(
            json=field.json_,
            json_object=bool(field.json_object),
            regex=field.regex,
            choice=field.choice,
            grammar=field.grammar,
            disable_any_whitespace=bool(field.disable_any_whitespace),
            disable_additional_properties=bool(field.disable_additional_properties),
            whitespace_pattern=field.whitespace_pattern,
        )


class ServiceLevelField(RequestModel):
    """Service level that a request declares: see `ServiceLevel`."""

    first_token_seconds: float
    tokens_per_second: float = 0.0


class CommonSamplingFields(RequestModel):
    """Fields that completions, chat completions and responses share."""

    model: str | None = None
    stream: bool | None = None
    request_id: str | None = None
    priority: int | None = None
    sla: ServiceLevelField | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | ListField[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: DictField[float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: ListField[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: ListField[int] | None = None
    bad_words: ListField[str] | None = None


class SamplingFields(CommonSamplingFields):
    """Fields that completions and chat completions share, including vLLM's fields."""

    stream_options: StreamOptions | None = None

    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None

    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: ListField[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    _PLAIN: ClassVar[tuple[str, ...]] = (
        *("n", "best_of", "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
        *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("min_tokens", "skip_special_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs"),
        "truncate_prompt_tokens",
    )

    def sampling_params(self, **values: Any) -> SamplingParams:
        """Return the sampling parameters. `values` replaces and adds parameters that depend on the endpoint.

        Raises:
            ApiError, RequestError: a value is out of range, or fields contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream = true", parameter="stream_options")
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise ApiError(
                400,
                f"best_of is {self.best_of} with n = {self.n or 1}: the best answers are known only at the end; set "
                "stream = false",
                parameter="best_of",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs cannot be streamed; set stream = false", parameter="prompt_logprobs")
        given = {name: getattr(self, name) for name in self._PLAIN if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_of(key): bias for key, bias in self.logit_bias.items()}
        constraint = self.constraint()
        if constraint is not None:
            given["structured_outputs"] = constraint
        return SamplingParams(**{**given, **values})

    def constraint(self) -> StructuredOutputsParams | None:
        """Return the constraint on the text that vLLM's fields request; None without one.

        Raises:
            ApiError: two fields constrain the text, or `guided_whitespace_pattern` comes without `guided_json`.
        """
        options = {"whitespace_pattern": self.guided_whitespace_pattern}
        if self.guided_whitespace_pattern is not None and self.guided_json is None:
            raise ApiError(400, "guided_whitespace_pattern needs guided_json", parameter="guided_whitespace_pattern")
        found = [
            (name, StructuredOutputsParams(**{name.removeprefix("guided_"): value, **options}))
            for name in _GUIDED
            if (value := getattr(self, name)) is not None
        ]
        if self.structured_outputs is not None:
            found.append(("structured_outputs", StructuredOutputsField.of(self.structured_outputs)))
        if any(params != found[0][1] for _, params in found):  # equal constraints in several fields are accepted
            names = " and ".join(name for name, _ in found)
            raise ApiError(400, f"{names} both constrain the text; keep one", parameter=found[1][0])
        return found[0][1] if found else None

    @property
    def constraint_field(self) -> str | None:
        """Name of vLLM's field that constrains the text; None: there is no constraint."""
        return next((name for name in (*_GUIDED, "structured_outputs") if getattr(self, name) is not None), None)

    def service_level(self) -> ServiceLevel | None:
        """Return the declared service level.

        Raises:
            ApiError: the time to the first token is not positive, or the rate is negative.
        """
        if self.sla is None:
            return None
        first, rate = self.sla.first_token_seconds, self.sla.tokens_per_second
        if first <= 0 or rate < 0:
            raise ApiError(
                400,
                f"sla has first_token_seconds = {first} and tokens_per_second = {rate}; write a time above 0 and a "
                "rate of at least 0",
                parameter="sla",
            )
        return ServiceLevel(first, rate)

    @property
    def wants_usage_event(self) -> bool:
        """True if the last event of a stream gives the number of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_in_each_event(self) -> bool:
        """True if the client requests the number of tokens in every event."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


def _token_of(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise ApiError(400, f"logit_bias has the key {one_line(key, 80)!r}; write token ids", parameter="logit_bias")
    return int(key)
