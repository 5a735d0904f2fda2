"""Protobuf <-> plain data for the decode pod's own service (`sluice.rpc.messages`)."""

from __future__ import annotations

from collections.abc import Iterable

from sluice.errors import InternalError
from sluice.rpc.convert import (
    failure_from_pb,
    layout_from_pb,
    layout_to_pb,
    mismatch_from_pb,
)
from sluice.rpc.convert_sampling import (
    all_logprobs_from_pb,
    logprobs_to_pb,
    prompt_scores_from_pb,
    prompt_scores_to_pb,
    sampling_from_pb,
    sampling_to_pb,
)
from sluice.rpc.messages import (
    Event,
    Finished,
    GenerateCall,
    PairReport,
    PodLayout,
    PromptScored,
    Tokens,
    Usage,
)
from sluice.transfer.messages import Moved, Timings
from sluice.types import AttemptId, Epoch, FinishReason, RequestId
from sluice.v1 import decode_pb2, layout_pb2, prefill_pb2


def generate_to_pb(call: GenerateCall) -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(
        request_id=call.request_id,
        attempt_id=call.attempt_id,
        prefill_address=call.prefill_address,
        prompt=call.prompt,
        sampling=sampling_to_pb(call.sampling),
        timeout_s=call.timeout_s,
        decode_epoch=call.decode_epoch,
        prefill_epoch=call.prefill_epoch,
        agreement_digest=call.agreement_digest,
    )


def generate_from_pb(request: decode_pb2.GenerateRequest) -> GenerateCall:
    return GenerateCall(
        request_id=RequestId(request.request_id),
        attempt_id=AttemptId(request.attempt_id),
        prefill_address=request.prefill_address,
        prompt=tuple(request.prompt),
        sampling=sampling_from_pb(request.sampling),
        timeout_s=request.timeout_s,
        decode_epoch=Epoch(request.decode_epoch),
        prefill_epoch=Epoch(request.prefill_epoch),
        agreement_digest=request.agreement_digest,
    )


def event_to_pb(event: Event) -> decode_pb2.GenerateResponse:
    """One message of ``Generate``."""
    match event:
        case PromptScored(positions):
            return decode_pb2.GenerateResponse(prompt_scored=prompt_scores_to_pb(positions))
        case Tokens():
            return decode_pb2.GenerateResponse(
                tokens=decode_pb2.TokenChunk(
                    token_ids=event.token_ids,
                    accepted_drafts=event.accepted_drafts,
                    logprobs=[logprobs_to_pb(one) for one in event.logprobs],
                    timings=None if event.timings is None else timings_to_pb(event.timings),
                )
            )
        case Finished(reason, usage):
            return decode_pb2.GenerateResponse(
                finished=decode_pb2.Finished(reason=reason.value, usage=usage_to_pb(usage))
            )


def event_from_pb(response: decode_pb2.GenerateResponse) -> Event:
    """Raises `InternalError` for an empty message."""
    kind = response.WhichOneof("message")
    if kind == "tokens":
        chunk = response.tokens
        accepted = chunk.accepted_drafts if chunk.HasField("accepted_drafts") else None
        timings = timings_from_pb(chunk.timings) if chunk.HasField("timings") else None
        logprobs = all_logprobs_from_pb(chunk.logprobs)
        return Tokens(tuple(chunk.token_ids), accepted, logprobs, timings)
    if kind == "finished":
        return Finished(_answered(response.finished.reason), usage_from_pb(response.finished.usage))
    if kind == "prompt_scored":
        return PromptScored(prompt_scores_from_pb(response.prompt_scored))
    raise InternalError("decode sent a message of no known kind", stage="decode")


def _answered(reason: str) -> FinishReason:
    """A request that did not end by itself has no usable answer, whatever its tokens."""
    if reason not in (FinishReason.STOP.value, FinishReason.LENGTH.value):
        raise InternalError(f"decode finished with reason {reason!r}", stage="decode")
    return FinishReason(reason)


def usage_to_pb(usage: Usage) -> decode_pb2.Usage:
    return decode_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        verify_steps=usage.verify_steps,
        accepted_drafts=usage.accepted_drafts,
        timings=timings_to_pb(usage.timings),
        components=[moved_to_pb(moved) for moved in usage.components],
    )


def usage_from_pb(usage: decode_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        verify_steps=usage.verify_steps,
        accepted_drafts=usage.accepted_drafts,
        timings=timings_from_pb(usage.timings),
        components=moved_from_pb(usage.components),
    )


def timings_to_pb(timings: Timings) -> prefill_pb2.Timings:
    return prefill_pb2.Timings(
        queue_s=timings.queue_s,
        prefill_s=timings.prefill_s,
        transfer_s=timings.transfer_s,
        adopt_s=timings.adopt_s,
        first_decode_s=timings.first_decode_s,
        ttft_s=timings.ttft_s,
        prefill_queue_s=timings.prefill_queue_s,
        wire_s=timings.wire_s,
    )


def timings_from_pb(timings: prefill_pb2.Timings) -> Timings:
    return Timings(
        timings.queue_s,
        timings.prefill_s,
        timings.transfer_s,
        timings.adopt_s,
        timings.first_decode_s,
        timings.ttft_s,
        timings.prefill_queue_s,
        timings.wire_s,
    )


def moved_to_pb(moved: Moved) -> prefill_pb2.ComponentDigest:
    return prefill_pb2.ComponentDigest(
        component=moved.component,
        digest=moved.digest,
        rows=moved.rows,
        bytes=moved.num_bytes,
        seconds=moved.seconds,
    )


def moved_from_pb(components: Iterable[prefill_pb2.ComponentDigest]) -> tuple[Moved, ...]:
    return tuple(Moved(c.component, c.rows, c.bytes, c.digest, c.seconds) for c in components)


def pod_layout_to_pb(pod: PodLayout) -> layout_pb2.GetLayoutResponse:
    return layout_pb2.GetLayoutResponse(
        layout=layout_to_pb(pod.layout), epoch=pod.epoch, fingerprint=pod.fingerprint
    )


def pod_layout_from_pb(response: layout_pb2.GetLayoutResponse) -> PodLayout:
    return PodLayout(layout_from_pb(response.layout), Epoch(response.epoch), response.fingerprint)


def pair_report_from_pb(response: decode_pb2.PairResponse) -> PairReport:
    return PairReport(
        agreed=response.agreed,
        agreement_digest=response.agreement_digest,
        prefill_epoch=Epoch(response.prefill_epoch),
        mismatches=tuple(mismatch_from_pb(mismatch) for mismatch in response.mismatches),
        canary_passed=response.canary_passed,
        canary_s=response.canary_s,
        components=moved_from_pb(response.components),
        failure=failure_from_pb(response.failure) if response.HasField("failure") else None,
    )
