"""Every metric Sluice exports, declared once: name with its unit, labels with few values, and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """``labels`` take values from small closed sets, or from pods that exist now; never from a client's words."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # histograms only


# From a cache hit on a small model to a long prompt in a long queue.
LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
ACCEPTANCE_TOKENS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0)

PARTS = ("queue", "prefill", "transfer", "adopt", "first_decode")  # of decode's TTFT, in order
ROUTER_PARTS = ("route", *PARTS)
ITEM_STATES = ("free", "held", "quarantined", "cached")


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, help, labels)


def _histogram(name: str, buckets: tuple[float, ...], help: str, *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, help, labels, buckets)


# -- the router ---------------------------------------------------------------------------------------------

HTTP_REQUESTS = _counter(
    "sluice_router_http_requests_total",
    "HTTP requests by route and status code.",
    "route",
    "status",
)
REQUESTS = _counter(
    "sluice_router_requests_total",
    "Answers to one prompt, by how they ended: stop, length, or the error's code.",
    "outcome",
)
ATTEMPTS = _counter(
    "sluice_router_attempts_total", "Tries of a request on a pair, by how they ended.", "outcome"
)
RETRIES = _counter(
    "sluice_router_retries_total",
    "Attempts that were followed by another one, by error code.",
    "code",
)
ROUTER_TTFT = _histogram(
    "sluice_router_ttft_seconds",
    LATENCY_S,
    "From the validated request to its first token, retries included.",
)
ROUTER_TTFT_PART = _histogram(
    "sluice_router_ttft_part_seconds",
    LATENCY_S,
    "Where that time went; the parts of a request add up to its TTFT.",
    "part",
)
ROUTER_ITL = _histogram(
    "sluice_router_itl_seconds",
    STEP_S,
    "Gap between two messages of an answer, divided by the tokens of the later one.",
)
ROUTER_E2E = _histogram(
    "sluice_router_e2e_seconds", LATENCY_S, "From the validated request to the end of its answer."
)
ROUTER_PROMPT_TOKENS = _counter("sluice_router_prompt_tokens_total", "Tokens of answered prompts.")
ROUTER_CACHED_TOKENS = _counter(
    "sluice_router_cached_tokens_total", "Of those, tokens that prefill had kept the state of."
)
ROUTER_OUTPUT_TOKENS = _counter("sluice_router_output_tokens_total", "Tokens of answers.")
ROUTER_RUNNING = _gauge(
    "sluice_router_running_requests", "Answers in the making, retries included."
)
ROUTER_QUEUED = _gauge("sluice_router_queued_requests", "Requests that wait for a pair.")
ROUTER_PODS = _gauge("sluice_router_pods", "Pods known, by role and state.", "role", "state")
ROUTER_PAIRS = _gauge("sluice_router_pairs", "Pairs known, by state.", "state")
BREAKER = _gauge(
    "sluice_router_breaker_state", "0 closed, 1 half-open, 2 open.", "decode", "prefill"
)

# -- both pods ----------------------------------------------------------------------------------------------

POD_INFO = _gauge(
    "sluice_pod_info", "Always 1; who this is.", "role", "epoch", "fingerprint", "model"
)
POD_READY = _gauge("sluice_pod_ready", "1 when the pod takes requests.", "role")
POD_QUEUED = _gauge("sluice_pod_queued_requests", "Requests that wait for memory.", "role")
POD_RUNNING = _gauge("sluice_pod_running_requests", "Requests that compute.", "role")
POD_WAITING = _gauge(
    "sluice_pod_waiting_requests", "Requests that hold memory and don't compute.", "role"
)
POD_STEPS = _counter("sluice_pod_steps_total", "Steps of the engine.", "role")
POD_ITEMS = _gauge(
    "sluice_pod_items",
    "Items of one index space by state; the states add up to the pool.",
    "role",
    "space",
    "state",
)
POD_COMPONENT_BYTES = _gauge(
    "sluice_pod_component_bytes", "Memory that a component's buffers take.", "role", "component"
)
POD_ATTEMPTS = _counter(
    "sluice_pod_attempts_total",
    "Attempts by how they ended: stop, length, complete, cancelled, or the error's code.",
    "role",
    "outcome",
)
POD_TRANSFERRED = _counter(
    "sluice_pod_transferred_bytes_total",
    "State that crossed, canaries included: sent by prefill, proven received by decode.",
    "role",
    "component",
)
POD_REFUSALS = _counter(
    "sluice_pod_refusals_total",
    "Handshakes refused, counted once for each field that was to blame.",
    "role",
    "field",
)

# -- decode -------------------------------------------------------------------------------------------------

TTFT = _histogram(
    "sluice_decode_ttft_seconds", LATENCY_S, "From Generate's arrival to the first token."
)
TTFT_PART = _histogram(
    "sluice_decode_ttft_part_seconds",
    LATENCY_S,
    "Where that time went; the parts of a request add up to its TTFT.",
    "part",
)
ITL = _histogram(
    "sluice_decode_itl_seconds",
    STEP_S,
    "Gap between two steps of a request, divided by the tokens of the later one.",
)
E2E = _histogram(
    "sluice_decode_e2e_seconds", LATENCY_S, "From Generate's arrival to the last token."
)
OUTPUT_TOKENS = _counter("sluice_decode_output_tokens_total", "Tokens emitted.")
RETRACTIONS = _counter(
    "sluice_decode_retractions_total", "Running requests taken off for want of memory."
)
RETRACTED = _gauge("sluice_decode_retracted_requests", "Requests that are taken off now.")
ACCEPTANCE = _histogram(
    "sluice_decode_acceptance_length_tokens",
    ACCEPTANCE_TOKENS,
    "Tokens of one verify step: accepted drafts plus one.",
)
ACCEPTANCE_RECENT = _gauge(
    "sluice_decode_acceptance_recent_tokens",
    "Mean acceptance length of the last verify steps; NaN before there were enough.",
)
ACCEPTANCE_COLLAPSED = _gauge(
    "sluice_decode_acceptance_collapsed", "1 while the draft is configured and of no use."
)
ACCEPTANCE_ALARMS = _counter(
    "sluice_decode_acceptance_alarms_total", "Times that acceptance collapsed."
)
PEERS = _gauge("sluice_decode_peers", "Prefill pods by state of their pairing.", "state")
QUARANTINED = _gauge(
    "sluice_decode_quarantined_attempts", "Attempts whose rows a peer may still write."
)
QUARANTINES = _counter(
    "sluice_decode_quarantines_total", "Attempts whose rows were set apart, since the start."
)
CANARY_RUNS = _counter(
    "sluice_decode_canary_runs_total",
    "Canaries by outcome: passed, or the error's code.",
    "outcome",
)
CANARY_SECONDS = _histogram(
    "sluice_decode_canary_seconds", LATENCY_S, "From a canary's start to its proof."
)
CANARY_PASSED_AT = _gauge(
    "sluice_decode_canary_passed_timestamp_seconds",
    "Unix time of the last canary that passed.",
    "prefill",
)
CANARY_RATE = _gauge(
    "sluice_decode_canary_bytes_per_second",
    "What the last canary measured, one component at a time.",
    "prefill",
    "component",
)
TRANSPORT = _gauge(
    "sluice_decode_transport_info",
    "Always 1; what UCX writes a peer's state with.",
    "prefill",
    "transport",
)

# -- prefill ------------------------------------------------------------------------------------------------

PREFILL_QUEUE = _histogram(
    "sluice_prefill_queue_seconds", LATENCY_S, "From Start's arrival to the first chunk's turn."
)
PREFILL_COMPUTE = _histogram(
    "sluice_prefill_compute_seconds", LATENCY_S, "From then to the last chunk's end."
)
PREFILL_TRANSFER = _histogram(
    "sluice_prefill_transfer_seconds",
    LATENCY_S,
    "From there until every write was acknowledged: what the transfer did not overlap.",
)
PREFILL_BUSY = _counter(
    "sluice_prefill_transfer_busy_seconds_total",
    "Sum over transfers from first post to last acknowledgement; bytes over this is the rate a transfer sees.",
)
PREFILL_PROMPT_TOKENS = _counter(
    "sluice_prefill_prompt_tokens_total", "Tokens of prompts read, canaries included."
)
PREFILL_CACHED_TOKENS = _counter(
    "sluice_prefill_cached_tokens_total", "Of those, tokens whose state had been kept."
)
PREFILL_PREFIX_BYTES = _gauge(
    "sluice_prefill_prefix_cache_bytes",
    "State kept for prompts that begin alike, in pages and on the host.",
)
PREFILL_PAIRED = _gauge("sluice_prefill_paired", "Decode pods this pod has agreed with.")
PREFILL_LIVE = _gauge("sluice_prefill_live_attempts", "Attempts not settled yet.")
PREFILL_STUCK = _gauge(
    "sluice_prefill_stuck_transfers", "Transfers given up while bytes of them may still land."
)

_ROUTER = (
    HTTP_REQUESTS,
    REQUESTS,
    ATTEMPTS,
    RETRIES,
    ROUTER_TTFT,
    ROUTER_TTFT_PART,
    ROUTER_ITL,
    ROUTER_E2E,
    ROUTER_PROMPT_TOKENS,
    ROUTER_CACHED_TOKENS,
    ROUTER_OUTPUT_TOKENS,
    ROUTER_RUNNING,
    ROUTER_QUEUED,
    ROUTER_PODS,
    ROUTER_PAIRS,
    BREAKER,
)
_BOTH_PODS = (
    POD_INFO,
    POD_READY,
    POD_QUEUED,
    POD_RUNNING,
    POD_WAITING,
    POD_STEPS,
    POD_ITEMS,
    POD_COMPONENT_BYTES,
    POD_ATTEMPTS,
    POD_TRANSFERRED,
    POD_REFUSALS,
)
_DECODE = (
    TTFT,
    TTFT_PART,
    ITL,
    E2E,
    OUTPUT_TOKENS,
    RETRACTIONS,
    RETRACTED,
    ACCEPTANCE,
    ACCEPTANCE_RECENT,
    ACCEPTANCE_COLLAPSED,
    ACCEPTANCE_ALARMS,
    PEERS,
    QUARANTINED,
    QUARANTINES,
    CANARY_RUNS,
    CANARY_SECONDS,
    CANARY_PASSED_AT,
    CANARY_RATE,
    TRANSPORT,
)
_PREFILL = (
    PREFILL_QUEUE,
    PREFILL_COMPUTE,
    PREFILL_TRANSFER,
    PREFILL_BUSY,
    PREFILL_PROMPT_TOKENS,
    PREFILL_CACHED_TOKENS,
    PREFILL_PREFIX_BYTES,
    PREFILL_PAIRED,
    PREFILL_LIVE,
    PREFILL_STUCK,
)
BY_ROLE: dict[str, tuple[Metric, ...]] = {
    "router": _ROUTER,
    "prefill": (*_BOTH_PODS, *_PREFILL),
    "decode": (*_BOTH_PODS, *_DECODE),
}
ALL = (*_ROUTER, *_BOTH_PODS, *_PREFILL, *_DECODE)


def markdown_table(metrics: tuple[Metric, ...]) -> str:
    """The table of ``docs/operations.md``."""
    head = ("| metric | kind | labels | meaning |", "| --- | --- | --- | --- |")
    rows = (
        f"| `{m.name}` | {m.kind.value} | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} |"
        for m in metrics
    )
    return "\n".join((*head, *rows))
