"""What happens to fields that this server doesn't have.

Real clients send more than any one server knows, so a field is judged by what it would do:

* a known field is used;
* a field that would change the answer (``best_of``, ``suffix``, ``audio``, ...) is accepted at the values
  that mean "off" and otherwise refused with 400 naming it: never a 200 with another answer;
* fields without influence on the answer (``user``, ``metadata``, ...) are ignored;
* any other field is ignored, and named in the log.

Request and attempt ids are made by the router; a client's ``request_id`` is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sluice.errors import BadRequest

Off = Mapping[str, tuple[Any, ...]]

# Fields that change the answer, each with the values that mean "off". None always does.
_SHARED: Off = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
COMPLETION_OFF: Off = {**_SHARED, "max_completion_tokens": (), "suffix": ("",)}
TEMPLATE_OFF: Off = {
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
}
CHAT_OFF: Off = {
    **_SHARED,
    **TEMPLATE_OFF,
    "audio": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
MESSAGE_OFF: Off = {"audio": (), "function_call": ()}
_NO_INFLUENCE = frozenset(
    {
        "attempt_id",
        "metadata",
        "prediction",  # makes answers sooner, not other
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",  # one text a token, whatever stands beside it
        "store",
        "user",
    }
)


class CheckedBody(BaseModel):
    """A body whose unknown fields are judged by ``off``."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    off: ClassVar[Off] = {}

    def check_extra(self) -> tuple[str, ...]:
        """Names to warn about. Raises `BadRequest` for a field that would change the answer."""
        unknown = []
        for name, value in sorted((self.model_extra or {}).items()):
            if value is None or name in _NO_INFLUENCE:
                continue
            if name not in self.off:
                unknown.append(name)
            elif value not in self.off[name]:
                raise BadRequest(f"{name} is not supported", field=name, remedy=f"leave {name} out")
        return tuple(unknown)


def whole_number(value: Any) -> Any:
    """JSON has one kind of numbers: 7.0 is an integer, and some clients write it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_WHOLE = BeforeValidator(whole_number)
Whole = Annotated[int, _WHOLE]
Count = Annotated[int, Field(ge=0), _WHOLE]
Positive = Annotated[int, Field(ge=1), _WHOLE]
Alternatives = Annotated[int, Field(ge=0, le=20), _WHOLE]  # beside a token's own logprob; OpenAI's


def checked_text(value: str) -> str:
    """JSON can spell half a surrogate pair, which is no character and has no tokens."""
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("is no valid Unicode text")
    return value
