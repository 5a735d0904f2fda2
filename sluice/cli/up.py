"""``sluice up``: the whole of Sluice on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from sluice.cli.places import log_folder, model_folder
from sluice.cli.progress import Progress, show_progress
from sluice.cli.stack import Stack, StackConfig, run_stack
from sluice.config import PoolMode
from sluice.errors import ConfigError

T = TypeVar("T")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("up", help="start prefill, decode and router on this machine")
    add_stack_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="where the router listens")
    parser.add_argument("--port", type=int, default=8000, help="the router's port; 0 = any free")
    parser.set_defaults(run=run)


def add_stack_arguments(parser: argparse.ArgumentParser) -> None:
    """What `up` and `ab` both need to start the three processes."""
    parser.add_argument("--model", default="tiny-dsv4", help="name under models/, or a folder")
    parser.add_argument(
        "--mode", default="paged", choices=[mode.value for mode in PoolMode], help="pool mode"
    )
    parser.add_argument(
        "--spec-steps", type=int, help="drafted tokens a step; 0 = off, left out = the draft's own"
    )
    parser.add_argument(
        "--pages", type=int, default=256, metavar="N", help="pages of state a pod, 128 tokens each"
    )
    parser.add_argument("--logs", help="folder for the three logs; a fresh one when left out")
    parser.add_argument("--ready-timeout", type=float, default=120.0, metavar="SECONDS")


def stack_config(args: argparse.Namespace, host: str = "127.0.0.1", port: int = 0) -> StackConfig:
    """Raises `ConfigError` for a model that isn't there."""
    return StackConfig(
        model_dir=model_folder(args.model),
        mode=PoolMode(args.mode),
        spec_steps=args.spec_steps,
        logs=log_folder(args.logs),
        host=host,
        port=port,
        ready_timeout_s=args.ready_timeout,
        num_pages=args.pages,
    )


def run(args: argparse.Namespace) -> int:
    """0 after Ctrl-C or SIGTERM. Raises `ConfigError`, or `ChildDied` when a service ended."""
    if args.port:
        _check_free(args.host, args.port)
    config = stack_config(args, args.host, args.port)
    asyncio.run(_up(config, Console()))
    return 0


async def _up(config: StackConfig, console: Console) -> None:
    console.print(f"logs in {config.logs}", soft_wrap=True, highlight=False)
    stopping = asyncio.Event()
    stack = Stack(config)
    with (
        show_progress(console, ("prefill", "decode", "router")) as progress,
        _stop_on_signals(stopping, stack.kill),
    ):
        async with run_stack(stack, progress.report):
            with suppress(_StopAsked):
                await _unless(stopping, stack.wait_ready(progress.report))
                _print_ready(console, progress, stack, config)
                raise await _unless(stopping, stack.wait_dead())


class _StopAsked(Exception):
    pass


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``. Raises `_StopAsked` when told to stop first; ``work`` is over then."""
    task = asyncio.create_task(work)
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _StopAsked
        return task.result()
    finally:
        task.cancel()
        stop.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


def _print_ready(console: Console, progress: Progress, stack: Stack, config: StackConfig) -> None:
    progress.close()
    path, body = _example(config.model_dir)
    console.print(f"\n[bold green]Sluice is up[/] at {stack.url} ({config.model_dir.name})")
    console.print(
        f"  prefill {stack.prefill_address}, decode {stack.decode_address}", highlight=False
    )
    console.print(
        f"\n  curl -N {stack.url}{path} \\\n"
        f"    -H 'content-type: application/json' \\\n"
        f"    -d '{json.dumps(body | {'max_tokens': 64, 'stream': True})}'\n",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    console.print("Ctrl-C stops all three.")


def _example(model_dir: Path) -> tuple[str, dict[str, object]]:
    """A path and a body that suit the model: a chat for one with a chat template."""
    if (model_dir / "chat_template.jinja").is_file():
        message = {"role": "user", "content": "What is the capital of France?"}
        return "/v1/chat/completions", {"messages": [message]}
    return "/v1/completions", {"prompt": "And it came to pass", "temperature": 0.7}


@contextmanager
def _stop_on_signals(stopping: asyncio.Event, kill: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks for an orderly stop, a second one kills the children."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        if stopping.is_set():
            kill()
        stopping.set()

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _check_free(host: str, port: int) -> None:
    """A taken port shows before three processes start."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host}:{port}: {error.strerror}",
            stage="start",
            remedy="stop what uses it, or choose another with --port",
        ) from error
