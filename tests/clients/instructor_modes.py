"""instructor: the modes that send a schema, whole and partial, sync and async, with usage.

Its other modes leave the form to the model, and this one writes gibberish.
"""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import version
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict


class Verdict(BaseModel):
    """Closed: an open object may go on with other fields, and this model would."""

    model_config = ConfigDict(extra="forbid")
    answer: Literal["yes", "no"]
    sure: bool


URL = os.environ["SLUICE_URL"] + "/v1"
ASK: Any = {
    "model": os.environ["SLUICE_MODEL"],
    "messages": [{"role": "user", "content": "Well?"}],
    "temperature": 0,
    "max_tokens": 600,
    "max_retries": 0,
}


def held(client: instructor.Instructor) -> None:
    verdict, answer = client.chat.completions.create_with_completion(response_model=Verdict, **ASK)
    assert isinstance(verdict, Verdict)
    assert answer.usage.completion_tokens > 0
    *_, last = client.chat.completions.create_partial(response_model=Verdict, **ASK)
    assert (last.answer, last.sure) == (verdict.answer, verdict.sure)


async def later(mode: instructor.Mode) -> None:
    async with openai.AsyncOpenAI(base_url=URL) as inner:
        client = instructor.from_openai(inner, mode=mode)
        assert isinstance(
            await client.chat.completions.create(response_model=Verdict, **ASK), Verdict
        )


modes = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
with openai.OpenAI(base_url=URL) as inner:
    for mode in modes:
        held(instructor.from_openai(inner, mode=mode))
        asyncio.run(later(mode))
names = ", ".join(mode.name for mode in modes)
print(f"{version('instructor')}: {names}: whole, partial, async, usage")
