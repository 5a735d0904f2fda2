"""Draws ``/status.json`` up from the fleet as the router sees it and from its recorder."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from services.router.fleet import FleetView, PairView, PodView
from services.router.page import schema
from services.router.recorder import Record, Recorder
from sluice.rpc.messages import CanaryStatus, PeerStatus, PoolStatus, PrefillStatus
from sluice.telemetry.catalogue import ROUTER_PARTS
from sluice.types import Role

_Key = tuple[str, str]  # addresses of decode and prefill


def status_of(model: str, fleet: FleetView, recorder: Recorder) -> schema.Status:
    peers: dict[_Key, PeerStatus] = {
        (pod.address, peer.address): peer
        for pod in fleet.pods
        if pod.status is not None
        for peer in pod.status.peers
    }
    now = time.time()
    pods = [_pod(pod, peers.values()) for pod in fleet.pods]
    pairs = [
        _pair(pair, peers.get((pair.pair.decode, pair.pair.prefill)), now) for pair in fleet.pairs
    ]
    return schema.Status(
        now_unix_s=now,
        started_unix_s=recorder.started_unix_s,
        model=model,
        ready=any(pair.usable for pair in pairs),
        alarms=list(_alarms(fleet, pods, pairs)),
        totals=_totals(fleet, recorder),
        pods=pods,
        pairs=pairs,
        answers=[_answer(record) for record in recorder.records()],
    )


def _pod(pod: PodView, peers: Iterable[PeerStatus]) -> schema.Pod:
    if pod.role is Role.DECODE:
        return _decode(pod)
    seen = [peer for peer in peers if peer.address == pod.address]
    own = next((peer.prefill for peer in seen if peer.prefill is not None), None)
    return _prefill(pod, seen, own)


def _decode(pod: PodView) -> schema.Pod:
    status = pod.status
    drafting = None
    if status is not None and status.acceptance.drafts:
        acceptance = status.acceptance
        drafting = schema.Drafting(
            recent_tokens=acceptance.recent_tokens,
            steps=acceptance.steps,
            collapsed=acceptance.collapsed,
        )
    return schema.Pod(
        role=pod.role.value,
        address=pod.address,
        name=pod.name,
        ready=not pod.problem,
        reason=pod.problem,
        epoch=status.epoch if status else "",
        queued=status.queued if status else 0,
        running=status.running if status else 0,
        capacity=pod.capacity,
        retractions=status.retractions if status else 0,
        pools=_pools(status.pools if status else ()),
        drafting=drafting,
    )


def _prefill(pod: PodView, seen: list[PeerStatus], own: PrefillStatus | None) -> schema.Pod:
    reachable = [peer for peer in seen if peer.state in ("agreed", "draining", "connecting")]
    reason = pod.problem or (own.reason if own else "")
    if not reason and not reachable:
        reason = (
            "; ".join(dict.fromkeys(f"{p.state}: {p.reason}" for p in seen))
            or "no decode pod knows it"
        )
    alive = own if reachable else None
    return schema.Pod(
        role=pod.role.value,
        address=pod.address,
        name=pod.name,
        ready=not reason,
        reason=reason,
        epoch=own.epoch if own else next((peer.epoch for peer in seen), ""),
        queued=alive.queued if alive else 0,
        running=alive.running if alive else 0,
        capacity=pod.capacity,
        retractions=0,
        pools=_pools(alive.pools if alive else ()),
        drafting=None,
    )


def _pools(pools: Iterable[PoolStatus]) -> list[schema.Pool]:
    return [
        schema.Pool(
            space=pool.space,
            total=pool.total,
            free=pool.free,
            held=pool.held,
            quarantined=pool.quarantined,
            cached=pool.cached,
            components=[
                schema.Component(name=part.name, bytes=part.num_bytes) for part in pool.components
            ],
        )
        for pool in pools
    ]


def _pair(pair: PairView, peer: PeerStatus | None, now: float) -> schema.Pair:
    reason = peer.reason if peer is not None and peer.reason else pair.reason
    return schema.Pair(
        decode=pair.pair.decode,
        prefill=pair.pair.prefill,
        state=pair.state,
        reason=reason,
        usable=pair.usable,
        breaker=pair.breaker,
        digest=pair.pair.digest,
        in_flight=pair.in_flight,
        quarantined_attempts=peer.quarantined_attempts if peer else 0,
        canary=_canary(peer.canary, now) if peer and peer.canary else None,
    )


def _canary(canary: CanaryStatus, now: float) -> schema.Canary:
    return schema.Canary(
        age_s=max(0.0, now - canary.finished_unix_s),
        seconds=canary.seconds,
        failure=canary.failure,
        transport=canary.transport,
        components=[
            schema.Crossed(
                component=moved.component, bytes=moved.num_bytes, bytes_per_s=moved.bytes_per_s
            )
            for moved in canary.components
        ],
    )


def _answer(record: Record) -> schema.Answer:
    end = time.monotonic() if record.ended_s is None else record.ended_s
    if record.first_token_s is None:
        spans = [schema.Span(part="waiting", seconds=end - record.started_s)]
    else:
        spans = [
            schema.Span(part=part, seconds=seconds)
            for part, seconds in zip(ROUTER_PARTS, record.parts(), strict=True)
        ]
        spans.append(schema.Span(part="decode", seconds=max(0.0, end - record.first_token_s)))
    steps = record.verify_steps
    return schema.Answer(
        request_id=record.request_id,
        attempt_id=record.attempt_id,
        attempts=record.attempts,
        decode=record.decode,
        prefill=record.prefill,
        started_unix_s=record.started_unix_s,
        outcome=record.outcome,
        spans=spans,
        ttft_s=record.ttft_s,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        acceptance_tokens=1 + record.accepted_drafts / steps if steps else None,
    )


def _totals(fleet: FleetView, recorder: Recorder) -> schema.Totals:
    answers_per_s, tokens_per_s = recorder.rates.per_second()
    return schema.Totals(
        answers=recorder.answers,
        failures=recorder.failures,
        running=recorder.num_running,
        waiting=fleet.waiting,
        answers_per_s=answers_per_s,
        tokens_per_s=tokens_per_s,
        ttft_p50_s=recorder.ttft_quantile(0.5),
        ttft_p95_s=recorder.ttft_quantile(0.95),
    )


def _alarms(fleet: FleetView, pods: list[schema.Pod], pairs: list[schema.Pair]) -> Iterator[str]:
    """Whole sentences: what is wrong now, the worst first."""
    if not any(pair.usable for pair in pairs):
        yield "No pair can serve: every request is refused."
    if fleet.problem:
        yield f"Discovery: {fleet.problem}"
    for pod in pods:
        if pod.drafting is not None and pod.drafting.collapsed:
            yield (
                f"Acceptance collapsed on {pod.address}: {pod.drafting.recent_tokens:.2f} tokens a verify step "
                f"over the last {pod.drafting.steps}."
            )
    for pair in pairs:
        if pair.canary is not None and pair.canary.failure:
            yield f"The last canary from {pair.prefill} to {pair.decode} failed: {pair.canary.failure}"
        if pair.quarantined_attempts:
            yield (
                f"{pair.quarantined_attempts} attempts are quarantined on {pair.decode}: "
                f"{pair.prefill} may still write their rows."
            )
        if pair.breaker != "closed":
            yield f"The breaker of {pair.decode} with {pair.prefill} is {pair.breaker}."
