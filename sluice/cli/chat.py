"""``sluice chat``: a conversation with a running router, on the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import httpx
from rich.console import Console

from sluice.cli.endpoint import add_endpoint_arguments, endpoint_of, http_client, served_model
from sluice.cli.stream import AnswerFailed, Chunk, UsageSeen, stream_answer

_TIMEOUT_S = 300.0
_HELP = (
    "/reset forgets the conversation, /system TEXT sets a system prompt (and resets), /help, /exit. "
    "Ctrl-C stops an answer, Ctrl-D leaves."
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("chat", help="talk to the model of a running router")
    add_endpoint_arguments(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="a system prompt")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="the same seed gives the same answers")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="no chat template: the model goes on with the text so far",
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Answer:
    """What came of one question; ``stopped`` by Ctrl-C. Times are seconds since it was asked."""

    text: str
    stopped: bool
    num_tokens: int
    first_s: float | None
    last_s: float
    usage: UsageSeen | None

    def line(self) -> str:
        """How fast it was, in one line."""
        parts = [f"{self.num_tokens} tokens"]
        if self.first_s is not None:
            after = self.last_s - self.first_s
            if self.num_tokens > 1 and after > 0:
                parts.append(f"{(self.num_tokens - 1) / after:.0f} tok/s")
            parts.append(f"first after {1000 * self.first_s:.0f} ms")
        serving = self.usage.serving if self.usage else None
        if serving is not None and serving.verify_steps:
            accepted = 1 + serving.accepted_drafts / serving.verify_steps
            parts.append(f"acceptance {accepted:.2f}")
        if self.usage is not None and self.usage.cached_tokens:
            parts.append(
                f"{self.usage.cached_tokens} of {self.usage.prompt_tokens} prompt tokens cached"
            )
        if self.stopped:
            parts.append("stopped")
        return ", ".join(parts)


@dataclass
class Conversation:
    """Turns so far as (role, text), and how each is put to the server."""

    model: str
    system: str
    raw: bool
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def path(self) -> str:
        return "/v1/completions" if self.raw else "/v1/chat/completions"

    def body(self) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        system = [("system", self.system)] if self.system else []
        if self.raw:
            return body | {"prompt": "".join(text for _, text in system + self.turns)}
        turns = [{"role": role, "content": text} for role, text in system + self.turns]
        return body | {"messages": turns}


def run(args: argparse.Namespace) -> int:
    """0 when the person left. Raises `PeerLost` when nobody answers at first."""
    console = Console(highlight=False)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # the arrow keys edit, and bring back what was said
    # A shell that started us in the background had it ignored; then Ctrl-C could not stop an answer.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with asyncio.Runner() as runner:
        client = http_client(endpoint_of(args), _TIMEOUT_S)
        try:
            conversation = Conversation(
                runner.run(served_model(client)),
                args.system,
                args.raw,
                args.max_tokens,
                args.temperature,
                args.top_p,
                args.seed,
            )
            console.print(f"{conversation.model} at {args.url}. {_HELP}", style="dim", markup=False)
            _talk(console, runner, client, conversation)
        finally:
            runner.run(client.aclose())
    return 0


def _talk(
    console: Console, runner: asyncio.Runner, client: httpx.AsyncClient, conversation: Conversation
) -> None:
    """Until the person leaves."""
    while True:
        try:
            said = console.input("[bold cyan]>[/] ")
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n(Ctrl-D leaves)", style="dim")
            continue
        word, _, rest = said.strip().partition(" ")
        if word in ("/exit", "/quit"):
            return
        if word == "/reset":
            conversation.turns.clear()
            console.print("forgotten", style="dim")
        elif word == "/system":
            conversation.system = rest.strip()
            conversation.turns.clear()
            console.print("system prompt set" if rest.strip() else "no system prompt", style="dim")
        elif word.startswith("/"):
            console.print(_HELP, style="dim", markup=False)
        elif word:
            _turn(console, runner, client, conversation, said)


def _turn(
    console: Console,
    runner: asyncio.Runner,
    client: httpx.AsyncClient,
    conversation: Conversation,
    said: str,
) -> None:
    conversation.turns.append(("user", said))

    def show(chunk: Chunk) -> None:
        if chunk.reasoning:
            console.out(chunk.reasoning, style="dim italic", end="", highlight=False)
        console.out(chunk.text, end="", highlight=False)

    try:
        answer = runner.run(converse(client, conversation, show))
    except AnswerFailed as error:
        conversation.turns.pop()  # so that it can be said again
        console.print(f"\n{error.kind}: {error.message}", style="bold red", markup=False)
        if "template" in error.message and not conversation.raw:
            console.print("`sluice chat --raw` does without a chat template", style="dim")
    except KeyboardInterrupt:  # before the answer began
        conversation.turns.pop()
        console.print("\nstopped", style="dim")
    else:
        conversation.turns.append(("assistant", answer.text))
        console.print(f"\n{answer.line()}", style="dim", markup=False)


async def converse(
    client: httpx.AsyncClient, conversation: Conversation, show: Callable[[Chunk], None]
) -> Answer:
    """Ask the last turn and show the answer as it comes; cancelling ends the answer and keeps what there is.

    Raises `AnswerFailed`.
    """
    began = time.perf_counter()
    texts: list[str] = []
    tokens = chunks = 0
    first: float | None = None
    last = 0.0
    usage: UsageSeen | None = None
    stopped = False
    try:
        async with aclosing(
            stream_answer(client, conversation.path(), conversation.body())
        ) as answer:
            async for chunk in answer:
                usage = chunk.usage or usage
                if chunk.text or chunk.reasoning or chunk.num_tokens:
                    last = time.perf_counter() - began
                    first = last if first is None else first
                    chunks += 1
                    tokens += chunk.num_tokens or 0
                    texts.append(chunk.text)
                    show(chunk)
    except asyncio.CancelledError:  # Ctrl-C: leaving the stream has already closed the connection
        stopped = True
    count = usage.completion_tokens if usage else tokens or chunks
    return Answer("".join(texts), stopped, count, first, last, usage)
