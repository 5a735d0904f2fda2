"""One streamed answer of an OpenAI-compatible server, as typed chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from sluice.errors import SluiceError

# What a server may say of the time to the first token; none is a part of another.
_PARTS = ("queue", "prefill", "transfer", "adopt", "first_decode")


class AnswerFailed(SluiceError):
    """``kind`` is short and the same for all failures of its kind, for counting."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Serving:
    """Sluice's own part of usage. ``parts``: names and seconds of what came before the first token, in order."""

    verify_steps: int
    accepted_drafts: int
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class UsageSeen:
    """``cached_tokens`` and ``serving`` None: the server didn't say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    serving: Serving | None


@dataclass(frozen=True)
class Chunk:
    """``num_tokens`` None: the server doesn't say how many tokens the text is."""

    text: str
    reasoning: str = ""
    num_tokens: int | None = None
    finish_reason: str | None = None
    usage: UsageSeen | None = None


async def stream_answer(
    client: httpx.AsyncClient, path: str, body: Mapping[str, object]
) -> AsyncGenerator[Chunk]:
    """Chunks as they arrive; ``body`` asks for one answer, streamed. Closing this closes the connection.

    Raises `AnswerFailed`: a status other than 200, an error event, a broken connection, no ``[DONE]``.
    """
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise _refused(response)
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                yield _chunk(json.loads(data))
    except httpx.TimeoutException as error:
        raise AnswerFailed("timeout", f"no byte within the time-out: {error!r}") from error
    except httpx.TransportError as error:
        raise AnswerFailed("connection", str(error) or type(error).__name__) from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise AnswerFailed("not OpenAI's format", f"{type(error).__name__}: {error}") from error
    raise AnswerFailed("cut short", "the stream ended without [DONE]")


def _refused(response: httpx.Response) -> AnswerFailed:
    try:
        error = response.json()["error"]
        code, message = error.get("code") or "", str(error["message"])
    except (ValueError, KeyError, TypeError):
        code, message = "", response.text[:200]
    return AnswerFailed(f"{response.status_code} {code}".strip(), message)


def _chunk(event: Any) -> Chunk:
    if "error" in event:
        error = event["error"]
        raise AnswerFailed(f"in mid-stream: {error.get('code')}", str(error.get("message")))
    usage = _usage(event["usage"]) if event.get("usage") else None
    if not event.get("choices"):
        return Chunk("", num_tokens=0, usage=usage)
    choice = event["choices"][0]
    delta = choice.get("delta")
    text = choice.get("text") if delta is None else delta.get("content")
    ids = choice.get("token_ids")
    return Chunk(
        text or "",
        (delta or {}).get("reasoning_content") or "",
        None if ids is None else len(ids),
        choice.get("finish_reason"),
        usage,
    )


def _usage(usage: Any) -> UsageSeen:
    details = usage.get("prompt_tokens_details") or {}
    own = usage.get("sluice")
    return UsageSeen(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=details.get("cached_tokens"),
        serving=None
        if own is None
        else Serving(
            verify_steps=own.get("verify_steps", 0),
            accepted_drafts=own.get("accepted_drafts", 0),
            parts=tuple((name, own[f"{name}_s"]) for name in _PARTS if f"{name}_s" in own),
        ),
    )
