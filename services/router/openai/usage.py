"""Usage of an answer, merged from both roles and summed over its prompts."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.generation import End
from services.router.openai.schema import PromptTokensDetails, ServingDetails, UsageBody


def usage_body(ends: Sequence[End]) -> UsageBody:
    """Cached tokens are left out, not guessed, when any answer was cut before prefill reported."""
    usages = [end.usage for end in ends]
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    known = not any(end.partial for end in ends)
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
