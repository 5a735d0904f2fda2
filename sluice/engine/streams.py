"""One request's token events as an async iterator whose closing aborts the request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Self

from sluice.types import RequestId, TokenEvent


class TokenStream(AsyncIterator[TokenEvent]):
    """Ends after the event with a finish reason, or raises the request's error. One reader.

    ``aclose()`` before the end aborts the request; so does losing the last reference.
    """

    def __init__(self, request_id: RequestId, abandon: Callable[[RequestId], None]) -> None:
        self.request_id = request_id
        self._abandon = abandon
        self._events: deque[TokenEvent] = deque()
        self._error: BaseException | None = None
        self._ended = False  # nothing more will come
        self._news = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._ended = self._ended or event.finish_reason is not None
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """Events that came before are still read first."""
        self._error, self._ended = error, True
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events:
            if self._ended:
                error, self._error = self._error, None
                raise error if error is not None else StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()

    async def aclose(self) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self._ended:
            self._ended = True
            self._abandon(self.request_id)
        self._events.clear()
        self._error = None
        self._news.set()
