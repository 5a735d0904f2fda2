"""``sluice ab``: the same prompts aggregated in this process and disaggregated over two pods."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from sluice.cli.comparison import Answer, Difference, acceptance_length, compare
from sluice.cli.endpoint import Endpoint, add_endpoint_arguments, endpoint_of, http_client
from sluice.cli.places import model_folder
from sluice.cli.progress import show_progress
from sluice.cli.prompts import default_prompts, prompts_from_file
from sluice.cli.stack import Stack, StackConfig, run_stack
from sluice.cli.up import add_stack_arguments, stack_config
from sluice.config import EngineConfig, PoolConfig, PoolMode, SpecConfig
from sluice.errors import InternalError
from sluice.text.tokenizer import ModelTokenizer
from sluice.types import Request, RequestId, Role, Sampling

Prompt = tuple[int, ...]
_REQUEST_TIMEOUT_S = 300.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "ab", help="compare aggregated and disaggregated answers, token by token"
    )
    add_stack_arguments(parser)
    add_endpoint_arguments(
        parser, None, "a running router; starts its own three processes otherwise"
    )
    parser.add_argument("--prompts", type=Path, help="a file with one prompt a line")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--concurrency", type=int, default=8, help="requests at once, on both sides"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when all answers are equal, 1 otherwise."""
    console = Console()
    model_dir = model_folder(args.model)
    tokenizer = ModelTokenizer.load(model_dir)
    prompts = (
        prompts_from_file(args.prompts, tokenizer) if args.prompts else default_prompts(tokenizer)
    )
    sampling = Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stop_token_ids=tokenizer.eos_token_ids,
    )
    # The pods first: the three processes and an engine in here would share the same few cores.
    if args.url:
        disaggregated = asyncio.run(
            _over_http(endpoint_of(args), prompts, sampling, args.concurrency)
        )
    else:
        config = stack_config(args)
        disaggregated = asyncio.run(
            _over_own_stack(config, console, prompts, sampling, args.concurrency)
        )
    console.print(f"aggregated: {len(prompts)} prompts in this process", highlight=False)
    mode = PoolMode(args.mode)
    spec = None if args.spec_steps is None else SpecConfig(args.spec_steps)
    aggregated = asyncio.run(
        _aggregated(model_dir, mode, spec, prompts, sampling, args.concurrency)
    )
    differences = [
        compare(index, a, b)
        for index, (a, b) in enumerate(zip(aggregated, disaggregated, strict=True))
    ]
    _print_report(console, prompts, aggregated, disaggregated, differences)
    return 0 if all(difference.equal for difference in differences) else 1


async def _over_own_stack(
    config: StackConfig,
    console: Console,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    concurrency: int,
) -> list[Answer]:
    stack = Stack(config)
    with show_progress(console, ("prefill", "decode", "router")) as progress:
        async with run_stack(stack, progress.report):
            await stack.wait_ready(progress.report)
            progress.close()
            console.print(f"disaggregated: {len(prompts)} prompts", highlight=False)
            return await _over_http(Endpoint(stack.url), prompts, sampling, concurrency)


async def _over_http(
    endpoint: Endpoint, prompts: Sequence[Prompt], sampling: Sampling, concurrency: int
) -> list[Answer]:
    async with http_client(endpoint, _REQUEST_TIMEOUT_S) as client:

        async def answer(_: int, prompt: Prompt) -> Answer:
            response = await client.post("/v1/completions", json=_body(prompt, sampling))
            if response.status_code != 200:
                raise InternalError(
                    f"{endpoint.url} answered {response.status_code}: {response.text}"
                )
            choice = response.json()["choices"][0]
            return Answer(
                tuple(choice["token_ids"]),
                tuple(choice["accepted_drafts"]),
                choice["finish_reason"],
            )

        try:
            return await _each(prompts, concurrency, answer)
        except httpx.TransportError as error:
            raise InternalError(f"{endpoint.url}: {error or type(error).__name__}") from error


def _body(prompt: Prompt, sampling: Sampling) -> dict[str, object]:
    return {
        "prompt": list(prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "return_token_ids": True,
        "timeout_s": _REQUEST_TIMEOUT_S,
    }


async def _aggregated(
    model_dir: Path,
    mode: PoolMode,
    spec: SpecConfig | None,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    concurrency: int,
) -> list[Answer]:
    import torch

    from sluice.engine.build import build_engine
    from sluice.engine.facade import EngineFacade

    torch.set_num_threads(1)
    core = build_engine(model_dir, Role.AGGREGATED, PoolConfig(mode=mode), spec, EngineConfig())
    facade = EngineFacade(core)
    await facade.start()

    async def answer(index: int, prompt: Prompt) -> Answer:
        request = Request(RequestId(f"ab-{index}"), prompt, sampling)
        events = [event async for event in facade.generate(request)]
        reason = events[-1].finish_reason
        assert reason is not None, "the last event ends the request"
        return Answer(
            tuple(token for event in events for token in event.token_ids),
            tuple(event.accepted_drafts for event in events),
            reason.value,
        )

    try:
        return await _each(prompts, concurrency, answer)
    finally:
        await facade.stop()


async def _each(
    prompts: Sequence[Prompt],
    concurrency: int,
    answer: Callable[[int, Prompt], Awaitable[Answer]],
) -> list[Answer]:
    """Answers in the order of ``prompts``, ``concurrency`` at a time."""
    free = asyncio.Semaphore(concurrency)

    async def one(index: int, prompt: Prompt) -> Answer:
        async with free:
            return await answer(index, prompt)

    return list(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts))))


def _print_report(
    console: Console,
    prompts: Sequence[Prompt],
    aggregated: Sequence[Answer],
    disaggregated: Sequence[Answer],
    differences: Sequence[Difference],
) -> None:
    different = [difference for difference in differences if not difference.equal]
    if different:
        table = Table(title="first differences (aggregated / disaggregated)")
        for heading in ("prompt", "prompt tokens", "token", "accepted at step", "reason"):
            table.add_column(heading)
        for d in different:
            a, b = aggregated[d.prompt], disaggregated[d.prompt]
            table.add_row(
                str(d.prompt),
                str(len(prompts[d.prompt])),
                _parting(d.token, a.token_ids, b.token_ids),
                _parting(d.step, a.accepted, b.accepted),
                "equal" if d.reasons is None else " / ".join(d.reasons),
            )
        console.print(table)
    tokens = sum(len(answer.token_ids) for answer in aggregated)
    verdict = f"[bold red]{len(different)} differ[/]" if different else "[bold green]all equal[/]"
    console.print(
        f"{len(prompts)} prompts, {tokens} tokens: {verdict}; acceptance length "
        f"{acceptance_length(aggregated):.3f} aggregated, "
        f"{acceptance_length(disaggregated):.3f} disaggregated",
        highlight=False,
        soft_wrap=True,
    )


def _parting(at: int | None, a: Sequence[object], b: Sequence[object]) -> str:
    if at is None:
        return "equal"
    left = a[at] if at < len(a) else "end"
    right = b[at] if at < len(b) else "end"
    return f"#{at}: {left} / {right}"
