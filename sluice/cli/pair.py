"""``sluice pair``: prove pairs of running pods, handshake and canary, and if asked one completion through the router.

The pairs are those that the router would use, or one that is named. Exit codes: 0 all proven, 1 one was refused or
failed, 2 nobody could be asked. The chart's `helm test` runs this. A router with API keys gets SLUICE_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import httpx

from sluice.cli.operator import add_tls_arguments, channel_of
from sluice.errors import ConfigError, NotReady, SluiceError
from sluice.rpc.channel import ChannelConfig
from sluice.rpc.client import DecodeClient
from sluice.rpc.messages import PairReport

_PROMPT = "And it came to pass"
_MAX_TOKENS = 8


@dataclass(frozen=True)
class Proof:
    """One line of the answer: a pair, or the completion."""

    what: str
    ok: bool
    detail: str

    def line(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'} {self.what}: {self.detail}"


@dataclass(frozen=True)
class Router:
    """Where it is and how to speak to it. ``api_key`` empty: none is asked for."""

    url: str
    api_key: str
    verify: bool
    timeout_s: float

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            verify=self.verify,
            timeout=self.timeout_s,
            trust_env=False,
        )


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "prove that state crosses from prefill to decode, pair by pair"
    parser = commands.add_parser("pair", help=about, description=about)
    parser.add_argument("--router", metavar="URL", help="prove every pair that this router knows")
    parser.add_argument("--decode", metavar="ADDRESS", help="with --prefill: prove this pair alone")
    parser.add_argument("--prefill", metavar="ADDRESS")
    parser.add_argument(
        "--complete", action="store_true", help="then ask the router for a completion"
    )
    parser.add_argument("--timeout-s", type=float, default=30.0, metavar="S", help="of each call")
    parser.add_argument(
        "--insecure-https", action="store_true", help="trust any router certificate"
    )
    add_tls_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises `ConfigError` for arguments that don't fit, `NotReady` when the router has no pair."""
    one = (args.decode, args.prefill)
    if bool(args.router) == any(one) or any(one) != all(one):
        raise ConfigError("give --router, or --decode and --prefill", stage="start")
    if args.complete and not args.router:
        raise ConfigError("--complete asks a router", stage="start", remedy="give --router")
    proofs = asyncio.run(_prove(args))
    if args.json:
        print(json.dumps([asdict(proof) for proof in proofs], indent=2))
    else:
        for proof in proofs:
            print(proof.line())
    return 0 if all(proof.ok for proof in proofs) else 1


async def _prove(args: argparse.Namespace) -> list[Proof]:
    config = channel_of(args)
    if not args.router:
        return [await _pair(args.decode, args.prefill, config, args.timeout_s)]
    key = os.environ.get("SLUICE_API_KEY", "")
    router = Router(args.router, key, not args.insecure_https, args.timeout_s)
    async with router.client() as http:
        pairs = await _pairs(http, router)
        proofs = [await _pair(d, p, config, args.timeout_s) for d, p in pairs]
        if args.complete:
            proofs.append(await _completion(http))
    return proofs


async def _pairs(http: httpx.AsyncClient, router: Router) -> Sequence[tuple[str, str]]:
    """Decode and prefill of every pair that ``/ready`` names."""
    try:
        answer = (await http.get("/ready")).json()
        pairs = [(str(pair["decode"]), str(pair["prefill"])) for pair in answer["pairs"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise NotReady(f"no router answers at {router.url}: {error!r}", stage="pair") from error
    if not pairs:
        reasons = "; ".join(map(str, answer.get("reasons", ()))) or "it knows no pod"
        raise NotReady(f"the router has no pair: {reasons}", stage="pair")
    return pairs


async def _pair(decode: str, prefill: str, config: ChannelConfig | None, timeout_s: float) -> Proof:
    what = f"{prefill} -> {decode}"
    async with DecodeClient(decode, config) as client:
        try:
            report = await client.pair(prefill, timeout_s)
        except SluiceError as error:
            return Proof(what, False, f"{error.code}: {error}")
    return Proof(what, report.agreed and report.canary_passed, _in_words(report))


def _in_words(report: PairReport) -> str:
    if not report.agreed:
        why = "; ".join(
            f"{m.path}: {m.prefill_value} against {m.decode_value}" for m in report.mismatches
        )
        return f"refused: {why or report.failure or 'no reason given'}"
    if not report.canary_passed:
        return f"agreed, but the canary failed: {report.failure or 'no reason given'}"
    moved = sum(part.num_bytes for part in report.components)
    count = len(report.components)
    return f"{count} components, {moved} bytes, digests equal, {report.canary_s:.3f} s"


async def _completion(http: httpx.AsyncClient) -> Proof:
    body = {"prompt": _PROMPT, "max_tokens": _MAX_TOKENS, "temperature": 0}
    try:
        response = await http.post("/v1/completions", json=body)
        document = response.json()
        if response.status_code != 200:
            message = document.get("error", {}).get("message", document)
            return Proof("completion", False, f"HTTP {response.status_code}: {message}")
        tokens, text = document["usage"]["completion_tokens"], document["choices"][0]["text"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, AttributeError) as error:
        return Proof("completion", False, repr(error))
    return Proof("completion", tokens > 0, f"{tokens} tokens, {text!r}")
