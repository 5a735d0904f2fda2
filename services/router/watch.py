"""One decode pod as the router sees it: asked for its status about once a second, at once after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sluice.errors import DeadlineExceeded, SluiceError
from sluice.rpc.client import DecodeClient
from sluice.rpc.messages import DecodeStatus
from sluice.telemetry.logging import get_logger

_STATUS_TIMEOUT_S = 1.0
_MAX_BACKOFF_S = 2.0
# A busy pod answers between two steps; only so many late ones in a row are a loss.
_LATE_ANSWERS = 3
_log = get_logger(__name__)


class DecodeWatch:
    """``status`` is None while the pod doesn't answer; ``problem`` then says why.

    ``changed`` is called after every answer and every failure. The client lives on for the ``leases`` that a
    retired pod still has.
    """

    def __init__(
        self,
        client: DecodeClient,
        refresh_s: float,
        changed: Callable[[DecodeWatch], None],
    ) -> None:
        self.client = client
        self.status: DecodeStatus | None = None
        self.problem = "not asked yet"
        self.max_model_tokens = 0  # as last stated: a limit doesn't end with a lost status
        self._refresh_s = refresh_s
        self._changed = changed
        self._late_answers = 0
        self._leases = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._look_again = asyncio.Event()
        self._asked = asyncio.Event()
        self._task = asyncio.create_task(self._watch(), name=f"watch {client.address}")

    async def asked_once(self) -> None:
        """Until the first answer or failure; bounded by the status call's own deadline."""
        await self._asked.wait()

    def look_again(self) -> None:
        """Something went wrong there: ask now."""
        self._look_again.set()

    def enter(self) -> None:
        self._leases += 1
        self._idle.clear()

    def leave(self) -> None:
        self._leases -= 1
        if self._leases == 0:
            self._idle.set()

    async def retire(self) -> None:
        """Ask no more; close the client once nothing runs over it, or when cancelled."""
        self._task.cancel()
        try:
            await self._idle.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.client.close()

    async def _watch(self) -> None:
        pause_s = self._refresh_s
        while True:
            answered = await self._ask()
            self._asked.set()
            self._changed(self)
            pause_s = self._refresh_s if answered else min(pause_s * 2, _MAX_BACKOFF_S)
            try:
                async with asyncio.timeout(max(pause_s, self._refresh_s)):
                    await self._look_again.wait()
            except TimeoutError:
                pass
            self._look_again.clear()

    async def _ask(self) -> bool:
        before = self.status is not None
        try:
            self.status = await self.client.get_status(_STATUS_TIMEOUT_S)
            self._late_answers = 0
            self.max_model_tokens = self.status.max_model_tokens
        except DeadlineExceeded as error:
            self._late_answers += 1
            self.problem = str(error)
            if self._late_answers >= _LATE_ANSWERS:
                self.status = None
        except SluiceError as error:
            self.status, self.problem = None, str(error)
        except Exception as error:  # a watcher that died would freeze the view for ever
            self.status, self.problem = None, f"{type(error).__name__}: {error}"
            _log.error("pairing_status_failed", exc_info=error)
        after = self.status is not None
        if before != after:
            _log.info("decode_seen" if after else "decode_lost", decode=self.client.address)
        return after
