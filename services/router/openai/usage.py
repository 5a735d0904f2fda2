"""Usage of a body, merged from both roles and summed over its choices, while it runs and at the end."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.generation import End, Job, Piece
from services.router.openai.schema import PromptTokensDetails, ServingDetails, UsageBody
from sluice.rpc.messages import Usage


class Tally:
    """Counts what was handed out. Jobs come prompt by prompt, ``samples`` for each."""

    def __init__(self, jobs: Sequence[Job], samples: int) -> None:
        self._prompts = [len(job.prompt) for job in jobs]
        self._completions = [0] * len(jobs)
        self._ends: list[End | None] = [None] * len(jobs)
        self._samples = samples

    def count(self, index: int, piece: Piece) -> None:
        self._completions[index] += sum(len(step.token_ids) for step in piece.steps)
        if piece.end is not None:
            self._ends[index] = piece.end
            self._completions[index] = piece.end.usage.completion_tokens

    def of(self, index: int) -> UsageBody:
        """Of one choice, so far."""
        return _counted(self._prompts[index], self._completions[index])

    def total(self) -> UsageBody:
        """Of all choices: as the pods counted, or what was handed out when some never ended.

        A prompt counts once, as its first answer saw it, however many answers it has. Cached tokens
        are left out, not guessed, when one of those was cut before prefill reported.
        """
        firsts = self._ends[:: self._samples]
        prompts = [
            count if end is None else end.usage.prompt_tokens
            for count, end in zip(self._prompts[:: self._samples], firsts, strict=True)
        ]
        total = _counted(sum(prompts), sum(self._completions))
        reported = [end.usage for end in firsts if end is not None and not end.partial]
        if len(reported) == len(firsts):
            cached = sum(usage.cached_tokens for usage in reported)
            total.prompt_tokens_details = PromptTokensDetails(cached_tokens=cached)
        usages = [end.usage for end in self._ends if end is not None]
        if len(usages) == len(self._ends):
            total.sluice = _serving(usages)
        return total


def _counted(prompt: int, completion: int) -> UsageBody:
    return UsageBody(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=None,
    )


def _serving(usages: Sequence[Usage]) -> ServingDetails:
    return ServingDetails(
        verify_steps=sum(usage.verify_steps for usage in usages),
        accepted_drafts=sum(usage.accepted_drafts for usage in usages),
        queue_s=max(usage.timings.queue_s for usage in usages),
        prefill_s=max(usage.timings.prefill_s for usage in usages),
        transfer_s=max(usage.timings.transfer_s for usage in usages),
        transferred_bytes=sum(m.num_bytes for usage in usages for m in usage.components),
    )
