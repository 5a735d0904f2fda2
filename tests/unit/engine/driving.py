"""Running an ``EngineCore`` by hand in tests: submit, step until idle, collect what each request
said.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady, Failed, Output, Prefilled, Reserved
from sluice.errors import SluiceError
from sluice.types import FinishReason, Logprobs, PromptLogprobs, Request, RequestId, TokenEvent
from tests.unit.engine.toy_model import copy_state

MAX_STEPS = 5000


@dataclass
class Story:
    """Everything one request said."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int | None] = field(default_factory=list)
    finish: FinishReason | None = None
    error: SluiceError | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None


def tell(stories: dict[RequestId, Story], outputs: Sequence[Output]) -> None:
    for output in outputs:
        story = stories.setdefault(output.request_id, Story())
        if isinstance(output, TokenEvent):
            story.tokens.extend(output.token_ids)
            story.accepted.append(output.accepted_drafts)
            story.finish = output.finish_reason
            story.logprobs.extend(output.logprobs)
            story.prompt_logprobs = output.prompt_logprobs or story.prompt_logprobs
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


def hand_over(
    requests: Sequence[Request],
    prefill: EngineCore,
    decode: EngineCore,
    *,
    with_draft: bool = True,
    retract_every: int = 0,
) -> dict[RequestId, Story]:
    """Prompts on one engine, answers on the other. With ``retract_every`` n everybody is taken off the
    memory before the first decode step and after every n-th one.
    """
    chunks: dict[RequestId, ChunkReady] = {}
    for one in requests:
        prefill.submit(one, lambda chunk: chunks.__setitem__(chunk.request_id, chunk))
        decode.submit(one)
    outcomes = {
        o.request_id: o.outcome for o in run_until_idle(prefill) if isinstance(o, Prefilled)
    }
    reservations = {
        o.request_id: o.reservation for o in run_until_idle(decode) if isinstance(o, Reserved)
    }
    for one in requests:
        name, chunk = one.request_id, chunks[one.request_id]
        assert chunk.first_token is not None
        target = reservations[name].tables
        copy_state(
            prefill.memory,
            chunk.tables,
            decode.memory,
            target,
            len(one.prompt),
            with_draft=with_draft,
        )
        prefill.release(name)
        first_logprobs = outcomes[name].first_logprobs
        decode.adopt(name, chunk.first_token, with_draft, first_logprobs)
    stories: dict[RequestId, Story] = {}
    tell(stories, decode.drain())
    for count in itertools.count():
        if retract_every and count % retract_every == 0:
            # The newest first: they come back oldest first, so into one another's items.
            for request in sorted(decode._scheduler._running, key=lambda r: -r.number):
                decode.retract(request.request_id)
            assert decode.memory.at_baseline()
        worked = decode.step()
        tell(stories, decode.drain())
        if not worked:
            break
    for name, outcome in outcomes.items():
        stories[name].prompt_logprobs = outcome.prompt_logprobs
    assert prefill.memory.at_baseline()
    assert decode.memory.at_baseline()
    return stories
