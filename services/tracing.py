"""Opens and closes the tracing of a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sluice.errors import ConfigError
from sluice.rpc.messages import GenerateCall
from sluice.telemetry.tracing import Tracing
from sluice.transfer.messages import AttemptStart


@asynccontextmanager
async def open_tracing(role: str, endpoint: str) -> AsyncIterator[Tracing]:
    """What is recorded is sent to ``endpoint`` and, at the end, flushed. Raises ``ConfigError`` without the extra."""
    try:
        tracing = Tracing.to(role, endpoint)
    except ImportError as error:
        raise ConfigError(
            f"tracing to {endpoint} needs OpenTelemetry, which isn't installed: {error}",
            stage="start",
            remedy="pip install 'sluice[tracing]', or leave otlp_endpoint empty",
        ) from error
    try:
        yield tracing
    finally:
        await asyncio.to_thread(tracing.flush)


def ids_of(attempt: GenerateCall | AttemptStart) -> dict[str, str | int]:
    """Attributes by which a span is found from a log line, and the other way round."""
    return {
        "sluice.request_id": attempt.request_id,
        "sluice.attempt_id": attempt.attempt_id,
        "sluice.prompt_tokens": len(attempt.prompt),
    }
