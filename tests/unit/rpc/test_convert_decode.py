"""Messages of the decode service survive the trip, and odd ones are typed errors."""

from __future__ import annotations

import pytest

from sluice.errors import InternalError
from sluice.rpc.convert_decode import (
    event_from_pb,
    event_to_pb,
    generate_from_pb,
    generate_to_pb,
)
from sluice.rpc.messages import (
    Finished,
    GenerateCall,
    PromptScored,
    Tokens,
    Usage,
)
from sluice.transfer.messages import Moved, Timings
from sluice.types import (
    AttemptId,
    FinishReason,
    Logprobs,
    RequestId,
    Sampling,
    TokenLogprob,
)
from sluice.v1 import decode_pb2

_USAGE = Usage(9, 4, 7, 3, 5, Timings(0.5, 0.25, 0.125), (Moved("target.swa", 3, 300, b"\x01"),))


def test_a_call_survives() -> None:
    sampling = Sampling(5, 0.5, 0.75, 40, (1 << 64) - 1, (1, 2), ignore_eos=True)
    call = GenerateCall(RequestId("r"), AttemptId("a"), "p:1", (0, 5, 70_000), sampling, 1.5)
    assert generate_from_pb(generate_to_pb(call)) == call


@pytest.mark.parametrize("accepted", [None, 0, 3])
def test_no_draft_and_nothing_accepted_stay_apart(accepted: int | None) -> None:
    tokens = Tokens((5, 6), accepted)
    assert event_from_pb(event_to_pb(tokens)) == tokens


def test_logprobs_survive() -> None:
    scored = Logprobs(-0.5, (TokenLogprob(70_000, -0.25), TokenLogprob(5, -0.5)))
    for event in (Tokens((5, 6), 1, (scored, Logprobs(-2.0))), PromptScored((None, scored))):
        assert event_from_pb(event_to_pb(event)) == event


def test_the_first_token_says_where_its_time_went() -> None:
    tokens = Tokens((5,), timings=Timings(1.0, 2.0, 3.0, 4.0, 5.0, 15.0, 0.5, 2.5))
    assert event_from_pb(event_to_pb(tokens)) == tokens


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_the_end_survives(reason: FinishReason) -> None:
    finished = Finished(reason, _USAGE)
    assert event_from_pb(event_to_pb(finished)) == finished


@pytest.mark.parametrize("reason", ["abort", "error", "", "made up"])
def test_an_end_without_an_answer_is_an_error(reason: str) -> None:
    message = decode_pb2.GenerateResponse(finished=decode_pb2.Finished(reason=reason))
    with pytest.raises(InternalError, match="finished with reason"):
        event_from_pb(message)


def test_an_empty_message_is_an_error() -> None:
    with pytest.raises(InternalError, match="no known kind"):
        event_from_pb(decode_pb2.GenerateResponse())
