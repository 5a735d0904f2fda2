"""Bodies of the completions API, and what happens to fields that this server doesn't have.

Policy. Real clients send more than any one server knows, so a field is judged by what it would do:

* a known field is used;
* a field that would change the answer (``n=2``, ``logprobs``, ``logit_bias``, ...) is accepted at the value
  that means "off" and otherwise refused with 400 naming it: never a 200 with another answer;
* fields without influence on the answer (``user``, ``metadata``, ...) are ignored;
* any other field is ignored, and named in the log.

Request and attempt ids are made by the router; a client's ``request_id`` is ignored.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from sluice.errors import BadRequest
from sluice.types import Sampling

Prompt = str | tuple[int, ...]
_PROMPT_FORMS = "must be a string, token ids, or a list of those"
_MAX_STOPS = 16
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA: list[Any] = [
    {"type": "string"},
    _IDS_SCHEMA,
    {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS_SCHEMA]}, "minItems": 1},
]

# Fields that change the answer, each with the values that mean "off". None always does.
_OFF: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (),
    "max_completion_tokens": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_NO_INFLUENCE = frozenset(
    {"attempt_id", "metadata", "priority", "request_id", "service_tier", "store", "user"}
)


class StreamOptions(BaseModel):
    include_usage: bool = False


class CompletionRequest(BaseModel):
    """``POST /v1/completions``. The last five fields are extensions."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: Any = Field(json_schema_extra={"anyOf": _PROMPT_SCHEMA})
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    timeout_s: float | None = Field(default=None, gt=0)
    return_token_ids: bool | None = None

    @field_validator("prompt")
    @classmethod
    def _known_form(cls, value: Any) -> Any:
        parse_prompts(value)
        return value

    @field_validator("stop")
    @classmethod
    def _usable_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > _MAX_STOPS:
            raise ValueError(f"at most {_MAX_STOPS} stop strings")
        if not all(stops) and value != "":
            raise ValueError("a stop string is empty")
        return value

    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts, each a text or token ids; at least one."""
        return parse_prompts(self.prompt)

    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    def sampling(self, eos_token_ids: tuple[int, ...], drawn_seed: int) -> Sampling:
        """OpenAI's defaults: 16 tokens, temperature 1. ``drawn_seed`` serves when none is given."""
        eos = () if self.ignore_eos else eos_token_ids
        return Sampling(
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            seed=drawn_seed if self.seed is None else self.seed % (1 << 64),
            stop_token_ids=tuple(dict.fromkeys((*(self.stop_token_ids or ()), *eos))),
            ignore_eos=bool(self.ignore_eos),
        )

    def check_extra(self) -> tuple[str, ...]:
        """Names to warn about. Raises `BadRequest` for a field that would change the answer."""
        unknown = []
        for name, value in sorted((self.model_extra or {}).items()):
            if value is None or name in _NO_INFLUENCE:
                continue
            if name not in _OFF:
                unknown.append(name)
            elif value not in _OFF[name]:
                raise BadRequest(f"{name} is not supported", field=name, remedy=f"leave {name} out")
        return tuple(unknown)


def parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """All prompts of a body's ``prompt``. Raises ValueError for any other form."""
    if isinstance(value, str):
        return (_text(value),)
    if not isinstance(value, list) or not value:
        raise ValueError(_PROMPT_FORMS)
    if all(_is_id(item) for item in value):
        return (tuple(value),)
    return tuple(_one_prompt(item) for item in value)


def _one_prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list) and value and all(_is_id(item) for item in value):
        return tuple(value)
    raise ValueError(_PROMPT_FORMS)


def _text(value: str) -> str:
    """JSON can spell half a surrogate pair, which is no character and has no tokens."""
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("is no valid Unicode text")
    return value


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class ServingDetails(BaseModel):
    """Extension: how the answer was made. Seconds are of the slowest prompt, counts are sums."""

    verify_steps: int
    accepted_drafts: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    transferred_bytes: int


class UsageBody(BaseModel):
    """``prompt_tokens_details`` is null when a stop string cut the answer before prefill reported."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    sluice: ServingDetails


class Choice(BaseModel):
    """``token_ids`` and ``accepted_drafts`` (one entry a step) come with ``return_token_ids`` only."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | None = None
    accepted_drafts: list[int | None] | None = None


class Completion(BaseModel):
    """A whole answer, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody | None = None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sluice"
    max_model_len: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
