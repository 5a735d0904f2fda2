"""Executes one step: drafts, one ragged target forward, choices, and the draft's look at what
became true.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sluice.engine.batch import (
    DecodeResult,
    DecodeWork,
    PrefillResult,
    PrefillWork,
    StepPlan,
    StepResult,
)
from sluice.engine.sampler import StepSampler
from sluice.errors import SluiceError, as_sluice_error
from sluice.models.base import ForwardBatch, Segment
from sluice.models.capture import HiddenCapture
from sluice.parallel.group import SINGLE, Parallel
from sluice.pools.base import StateMemory
from sluice.spec.commit import CommittedTarget
from sluice.spec.draft import Drafter, DraftTask, Proposal
from sluice.spec.logprobs import score
from sluice.spec.steering import Steering
from sluice.types import Logprobs

log = logging.getLogger(__name__)

NO_DRAFTS = Proposal((), None)
SCORED_ROWS = 128  # of a prompt at a time: 128 rows of 150,000 logits are 77 MB


class Runner:
    """Owns no request state: the plan names everything, the memory holds everything."""

    def __init__(
        self,
        target: CommittedTarget,
        logits: Callable[[Tensor], Tensor],
        drafter: Drafter | None,
        memory: StateMemory,
        draft_window: int,
        parallel: Parallel = SINGLE,
    ) -> None:
        self._target = target
        self._logits = logits
        self._drafter = drafter
        self._memory = memory
        self._draft_window_tokens = draft_window
        self._parallel = parallel

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run the step. State is written at its positions, recurrent state is committed; moving
        ``kv_len`` is not done here.
        """
        proposals = self._propose(plan.decodes)
        segments = [
            Segment(work.tables, work.tables.kv_len, (work.newest_token, *proposal.token_ids))
            for work, proposal in zip(plan.decodes, proposals, strict=True)
        ]
        segments += [
            Segment(work.tables, work.start, work.prompt[work.start : work.stop])
            for work in plan.prefills
        ]
        batch = ForwardBatch.build(segments, self._memory)
        # Without drafts nothing can be rejected, and every segment's state moves on as it is.
        num_verify = len(proposals) if any(one.token_ids for one in proposals) else 0
        capture = self._capture()
        hidden = self._target.forward(batch, num_verify, capture)
        try:
            result = self._choose(plan, proposals, hidden)
        except BaseException:
            self._target.discard()
            raise
        reached = self._target.commit([decode.accepted for decode in result.decodes])
        if reached:
            pairs = zip(result.decodes, reached, strict=True)
            result = replace(result, decodes=tuple(replace(d, reached=r) for d, r in pairs))
        if self._drafter is not None:
            streams = hidden if capture is None else capture.hidden()
            self._observe(self._drafter, plan, segments, result, streams)
        return result

    def fence(self) -> Callable[[], None]:
        """A call that blocks until the device has done everything queued so far."""
        device = self._memory.arena().device
        if device.type != "cuda":
            return _nothing
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event.synchronize

    def _propose(self, decodes: Sequence[DecodeWork]) -> list[Proposal]:
        if self._drafter is None or not decodes:
            return [NO_DRAFTS for _ in decodes]
        proposals = self._drafter.propose(
            [
                DraftTask(work.tables, work.drafts, work.sampling, work.newest_token)
                for work in decodes
            ]
        )
        if self._parallel.size == 1:
            return proposals
        agreed = self._parallel.decide(lambda: [one.token_ids for one in proposals])
        return [replace(one, token_ids=ids) for one, ids in zip(proposals, agreed, strict=True)]

    def _capture(self) -> HiddenCapture | None:
        """One a forward, for a draft that reads streams between the target's layers."""
        layers = () if self._drafter is None else self._drafter.captured_layers
        return HiddenCapture(layers) if layers else None

    def _choose(self, plan: StepPlan, proposals: Sequence[Proposal], hidden: Tensor) -> StepResult:
        """Logits of verified rows and of finished prompts' last rows, then the verdicts."""
        verified = sum(len(proposal.token_ids) + 1 for proposal in proposals)
        rows, at = list(range(verified)), verified
        scores: list[tuple[Logprobs, ...]] = []
        for chunk in plan.prefills:
            scores.append(self._score_prompt(chunk, hidden, at))
            at += chunk.stop - chunk.start
            if chunk.final:
                rows.append(at - 1)
        if not rows:
            return StepResult((), tuple(PrefillResult(prompt_logprobs=each) for each in scores))
        logits_RV = self._logits(hidden[rows])
        # Ranks see the same logits, but one's word counts: a tie that another breaks otherwise would part
        # their requests for good, as would an error that another doesn't have.
        chosen = self._parallel.decide(lambda: self._chosen(plan, proposals, logits_RV, scores))
        if isinstance(chosen, SluiceError):
            raise chosen
        return chosen

    def _chosen(
        self,
        plan: StepPlan,
        proposals: Sequence[Proposal],
        logits_RV: Tensor,
        scores: Sequence[tuple[Logprobs, ...]],
    ) -> StepResult | SluiceError:
        """On rank 0. An error is an answer, too: all ranks fail the step's requests, and go on."""
        try:
            return self._verdicts(plan, proposals, logits_RV, scores)
        except Exception as error:
            if self._parallel.size == 1:
                raise
            log.exception("no tokens could be chosen")
            return as_sluice_error(error, stage="choose")

    def _verdicts(
        self,
        plan: StepPlan,
        proposals: Sequence[Proposal],
        logits_RV: Tensor,
        scores: Sequence[tuple[Logprobs, ...]],
    ) -> StepResult:
        sampler = StepSampler(logits_RV)
        row, decodes = 0, []
        for work, proposal in zip(plan.decodes, proposals, strict=True):
            position = work.tables.kv_len + 1
            verdict = sampler.verify(row, position, proposal, work.sampling, work.steering)
            drafted = len(proposal.token_ids)
            logprobs = sampler.logprobs(row, verdict.token_ids, work.sampling)
            decodes.append(
                DecodeResult(
                    verdict.token_ids,
                    verdict.accepted,
                    drafted,
                    logprobs,
                    failure=_failure(work.steering),
                )
            )
            row += drafted + 1
        prefills: list[PrefillResult] = []
        for chunk, each in zip(plan.prefills, scores, strict=True):
            if not chunk.final:
                prefills.append(PrefillResult(prompt_logprobs=each))
                continue
            first = sampler.first_token(row, chunk.stop, chunk.sampling, chunk.steering)
            own = next(iter(sampler.logprobs(row, (first,), chunk.sampling)), None)
            prefills.append(PrefillResult(first, own, each, _failure(chunk.steering)))
            row += 1
        return StepResult(tuple(decodes), tuple(prefills))

    def _score_prompt(self, chunk: PrefillWork, hidden: Tensor, at: int) -> tuple[Logprobs, ...]:
        """Logprobs of the prompt's tokens after each row of the chunk, which are ``hidden[at:]``.

        A few rows at a time: logits of a whole chunk could need more memory than the model.
        """
        alternatives = chunk.sampling.prompt_logprobs
        if alternatives is None:
            return ()
        scores: list[Logprobs] = []
        following = chunk.prompt[chunk.start + 1 : chunk.stop + 1]
        for start in range(0, len(following), SCORED_ROWS):
            ids = following[start : start + SCORED_ROWS]
            logits = self._logits(hidden[at + start : at + start + len(ids)])
            scores += score(logits, ids, alternatives)
        return tuple(scores)

    def _observe(
        self,
        drafter: Drafter,
        plan: StepPlan,
        segments: Sequence[Segment],
        result: StepResult,
        hidden: Tensor,
    ) -> None:
        """The draft re-reads accepted rows with the target's true streams, and of a prompt what its
        window can see.
        """
        observed: list[Segment] = []
        rows: list[int] = []
        at = 0
        for segment, decode in zip(segments, result.decodes, strict=False):
            observed.append(Segment(segment.tables, segment.start, decode.token_ids))
            rows.extend(range(at, at + len(decode.token_ids)))
            at += len(segment.token_ids)
        for chunk, prefilled in zip(plan.prefills, result.prefills, strict=True):
            start = max(chunk.start, len(chunk.prompt) - self._draft_window_tokens)
            if start < chunk.stop:
                ids = chunk.prompt[start + 1 : chunk.stop + 1]
                if prefilled.first_token is not None:
                    ids = (*ids, prefilled.first_token)
                observed.append(Segment(chunk.tables, start, ids))
                rows.extend(range(at + start - chunk.start, at + chunk.stop - chunk.start))
            at += chunk.stop - chunk.start
        if observed:
            drafter.observe(observed, hidden[rows])


def _failure(steering: Steering | None) -> SluiceError | None:
    return None if steering is None else steering.failure


def _nothing() -> None:
    """The CPU's fence."""
