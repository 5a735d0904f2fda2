"""instructor: every mode it has for such servers, and partial objects of a stream."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    sure: bool


ASK: Any = {
    "model": os.environ["SLUICE_MODEL"],
    "messages": [{"role": "user", "content": "Well?"}],
    "temperature": 0,
    "max_tokens": 600,
    "max_retries": 0,
}
modes = ("TOOLS", "JSON_SCHEMA")
with openai.OpenAI(base_url=os.environ["SLUICE_URL"] + "/v1") as inner:
    for mode in modes:
        client = instructor.from_openai(inner, mode=instructor.Mode[mode])
        assert isinstance(client.chat.completions.create(response_model=Verdict, **ASK), Verdict)
        *_, last = client.chat.completions.create_partial(response_model=Verdict, **ASK)
        assert last.answer in ("yes", "no")
print(f"{version('instructor')}: {', '.join(modes)}, whole and partial")
