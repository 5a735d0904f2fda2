"""Usage of an answer, merged from both roles and summed over its choices."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.generation import End
from services.router.openai.schema import PromptTokensDetails, ServingDetails, UsageBody


def usage_body(ends: Sequence[End], samples: int = 1) -> UsageBody:
    """Usage of a body with ``samples`` answers to each prompt, ``ends`` prompt by prompt.

    A prompt counts once, as its first answer saw it, however many answers it has. Cached tokens
    are left out, not guessed, when one of those was cut before prefill reported.
    """
    usages = [end.usage for end in ends]
    firsts = ends[::samples]
    prompt = sum(end.usage.prompt_tokens for end in firsts)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(end.usage.cached_tokens for end in firsts)
    known = not any(end.partial for end in firsts)
    return UsageBody(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached) if known else None,
        sluice=ServingDetails(
            verify_steps=sum(usage.verify_steps for usage in usages),
            accepted_drafts=sum(usage.accepted_drafts for usage in usages),
            queue_s=max(usage.timings.queue_s for usage in usages),
            prefill_s=max(usage.timings.prefill_s for usage in usages),
            transfer_s=max(usage.timings.transfer_s for usage in usages),
            transferred_bytes=sum(m.num_bytes for usage in usages for m in usage.components),
        ),
    )
