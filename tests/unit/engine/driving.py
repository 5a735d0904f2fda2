"""Running an ``EngineCore`` by hand in tests: submit, step until idle, collect what each request
said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.engine.core import EngineCore
from sluice.engine.outputs import Failed, Output
from sluice.errors import SluiceError
from sluice.types import FinishReason, Request, RequestId, TokenEvent

MAX_STEPS = 5000


@dataclass
class Story:
    """Everything one request said."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int | None] = field(default_factory=list)
    finish: FinishReason | None = None
    error: SluiceError | None = None


def tell(stories: dict[RequestId, Story], outputs: Sequence[Output]) -> None:
    for output in outputs:
        story = stories.setdefault(output.request_id, Story())
        if isinstance(output, TokenEvent):
            story.tokens.extend(output.token_ids)
            story.accepted.append(output.accepted_drafts)
            story.finish = output.finish_reason
        elif isinstance(output, Failed):
            story.error = output.error


def run_until_idle(core: EngineCore) -> list[Output]:
    outputs = core.drain()
    for _ in range(MAX_STEPS):
        worked = core.step()
        outputs += core.drain()
        if not worked:
            return outputs
    raise AssertionError("the engine never came to rest")


def run_all(core: EngineCore, requests: Sequence[Request]) -> dict[RequestId, Story]:
    for one in requests:
        core.submit(one)
    stories: dict[RequestId, Story] = {}
    tell(stories, run_until_idle(core))
    assert core.memory.at_baseline()
    return stories
