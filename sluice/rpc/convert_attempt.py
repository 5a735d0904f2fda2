"""Protobuf <-> plain data for what decode and prefill say about one attempt (``transfer.messages``)."""

from __future__ import annotations

from sluice.layout.span import Run
from sluice.rpc.convert_decode import moved_from_pb, moved_to_pb, timings_from_pb, timings_to_pb
from sluice.rpc.convert_sampling import (
    logprobs_from_pb,
    logprobs_to_pb,
    prompt_scores_from_pb,
    prompt_scores_to_pb,
    sampling_from_pb,
    sampling_to_pb,
)
from sluice.transfer.messages import (
    AttemptComplete,
    AttemptStart,
    ComponentGrant,
)
from sluice.types import AttemptId, Epoch, RequestId
from sluice.v1 import prefill_pb2


def start_to_pb(start: AttemptStart) -> prefill_pb2.Start:
    return prefill_pb2.Start(
        attempt_id=start.attempt_id,
        request_id=start.request_id,
        decode_epoch=start.decode_epoch,
        prefill_epoch=start.prefill_epoch,
        agreement_digest=start.agreement_digest,
        prompt=start.prompt,
        sampling=sampling_to_pb(start.sampling),
        timeout_s=start.timeout_s,
        have_tokens=start.have_tokens,
        grants=[grant_to_pb(grant) for grant in start.grants],
        want_digests=start.want_digests,
        measure=start.measure,
    )


def start_from_pb(start: prefill_pb2.Start) -> AttemptStart:
    return AttemptStart(
        attempt_id=AttemptId(start.attempt_id),
        request_id=RequestId(start.request_id),
        decode_epoch=Epoch(start.decode_epoch),
        prefill_epoch=Epoch(start.prefill_epoch),
        agreement_digest=start.agreement_digest,
        prompt=tuple(start.prompt),
        sampling=sampling_from_pb(start.sampling),
        timeout_s=start.timeout_s,
        have_tokens=start.have_tokens,
        grants=tuple(grant_from_pb(grant) for grant in start.grants),
        want_digests=start.want_digests,
        measure=start.measure,
    )


def grant_to_pb(grant: ComponentGrant) -> prefill_pb2.ComponentGrant:
    runs = [prefill_pb2.RowRun(first=run.first, count=run.count) for run in grant.runs]
    return prefill_pb2.ComponentGrant(component=grant.component, runs=runs)


def grant_from_pb(grant: prefill_pb2.ComponentGrant) -> ComponentGrant:
    return ComponentGrant(grant.component, tuple(Run(run.first, run.count) for run in grant.runs))


def complete_to_pb(complete: AttemptComplete) -> prefill_pb2.Complete:
    first, prompt = complete.first_logprobs, complete.prompt_logprobs
    return prefill_pb2.Complete(
        attempt_id=complete.attempt_id,
        prefill_epoch=complete.prefill_epoch,
        first_token=complete.first_token,
        prompt_tokens=complete.prompt_tokens,
        cached_tokens=complete.cached_tokens,
        timings=timings_to_pb(complete.timings),
        components=[moved_to_pb(moved) for moved in complete.components],
        first_logprobs=None if first is None else logprobs_to_pb(first),
        prompt_scores=None if prompt is None else prompt_scores_to_pb(prompt),
        transport=complete.transport,
    )


def complete_from_pb(complete: prefill_pb2.Complete) -> AttemptComplete:
    has = complete.HasField
    return AttemptComplete(
        attempt_id=AttemptId(complete.attempt_id),
        prefill_epoch=Epoch(complete.prefill_epoch),
        first_token=complete.first_token,
        prompt_tokens=complete.prompt_tokens,
        cached_tokens=complete.cached_tokens,
        timings=timings_from_pb(complete.timings),
        components=moved_from_pb(complete.components),
        first_logprobs=(
            logprobs_from_pb(complete.first_logprobs) if has("first_logprobs") else None
        ),
        prompt_logprobs=(
            prompt_scores_from_pb(complete.prompt_scores) if has("prompt_scores") else None
        ),
        transport=complete.transport,
    )
