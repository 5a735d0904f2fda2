"""What happens to fields that this server doesn't have.

Real clients send more than any one server knows, so a field is judged by what it would do:

* a known field is used;
* a field that would change the answer (``tools``, ``logprobs``, ``logit_bias``, ...) is accepted at the values
  that mean "off" and otherwise refused with 400 naming it: never a 200 with another answer;
* fields without influence on the answer (``user``, ``metadata``, ...) are ignored;
* any other field is ignored, and named in the log.

Request and attempt ids are made by the router; a client's ``request_id`` is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from sluice.errors import BadRequest

Off = Mapping[str, tuple[Any, ...]]

# Fields that change the answer, each with the values that mean "off". None always does.
_SHARED: Off = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
COMPLETION_OFF: Off = {**_SHARED, "logprobs": (), "max_completion_tokens": (), "suffix": ("",)}
TEMPLATE_OFF: Off = {
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "tools": ([],),
}
CHAT_OFF: Off = {
    **_SHARED,
    **TEMPLATE_OFF,
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),  # without tools, "auto" chooses none
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
MESSAGE_OFF: Off = {"audio": (), "function_call": (), "tool_call_id": (), "tool_calls": ([],)}
_NO_INFLUENCE = frozenset(
    {
        "attempt_id",
        "metadata",
        "parallel_tool_calls",  # there are no tools
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)


class CheckedBody(BaseModel):
    """A body whose unknown fields are judged by ``off``."""

    model_config = ConfigDict(extra="allow", strict=True)
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


def checked_text(value: str) -> str:
    """JSON can spell half a surrogate pair, which is no character and has no tokens."""
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("is no valid Unicode text")
    return value
