"""Which prefill and decode pod serve a request: one admission for both, only where an agreement is known."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.discovery.registry import (
    PodRecord,
    Registry,
    RegistryView,
    Source,
    keep_watching,
)
from services.router.admission import Admission
from services.router.breaker import Breaker, BreakerState, BreakerTimes, counts_against_pair
from services.router.fleet import FleetView, Pair, PairView, PodView
from services.router.lease import Lease, Readiness
from services.router.loads import Loads
from services.router.matrix import Cell, cells_of, decode_problem, settled
from services.router.policy import Candidate, Load, Policy
from services.router.watch import DecodeWatch
from sluice.errors import NotReady, SluiceError
from sluice.rpc.client import DecodeClient
from sluice.telemetry.logging import get_logger
from sluice.types import Role

_FIRST_VIEW_S = 5.0  # how long the start waits for discovery; a slow one fills in later
_log = get_logger(__name__)


@dataclass(frozen=True)
class PairingConfig:
    """``max_in_flight`` bounds this router's attempts on a decode pod; 0 = the pod's own capacity does.

    ``pair_wait_s``: how long requests wait for a pair to become usable before they are refused.
    ``any_prefill``: use whatever prefill a decode pod has agreed with, listed or not.
    """

    refresh_s: float = 1.0
    max_in_flight: int = 0
    max_waiting: int = 256
    patience_s: float = 30.0
    pair_wait_s: float = 5.0
    any_prefill: bool = False
    breaker: BreakerTimes = field(default_factory=BreakerTimes)


class Pairing:
    """Follows discovery and the decode pods, and hands out pairs. All methods run on the event loop."""

    def __init__(
        self,
        source: Source,
        policy: Policy,
        config: PairingConfig,
        connect: Callable[[str], DecodeClient] = DecodeClient,
    ) -> None:
        self.draining = False
        self._source = source
        self._policy = policy
        self._config = config
        self._connect = connect
        self._registry = Registry()
        self._watches: dict[str, DecodeWatch] = {}
        self._decodes: dict[str, PodRecord] = {}
        self._prefills: dict[str, PodRecord] = {}
        self._cells: list[Cell] = []
        self._open: list[Cell] = []  # those that requests may go to, breakers aside
        self._breakers: dict[Pair, Breaker] = {}
        self._last_pick: dict[Pair, int] = {}
        self._picks = itertools.count(1)
        self._loads = Loads()
        self._admission: Admission[Lease] = Admission(config.max_waiting, config.patience_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._probe_timer: asyncio.TimerHandle | None = None
        self._despair: asyncio.TimerHandle | None = None
        self._hopeless = False  # no pair has been usable for longer than anybody should wait

    async def start(self) -> None:
        """Look at every pod once (bounded), then keep looking in the background."""
        self._registry.listen(self._on_pods)
        self._spawn(keep_watching(self._source, self._registry))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_VIEW_S):
                while not (self._registry.view.version or self._registry.view.problem):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        await asyncio.gather(*(watch.asked_once() for watch in self._watches.values()))

    async def stop(self) -> None:
        for timer in (self._probe_timer, self._despair):
            if timer is not None:
                timer.cancel()
        self._admission.fail(lambda: NotReady("the router is shutting down", stage="queue"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(watch.close() for watch in self._watches.values()))

    # -- what is known --------------------------------------------------------------------------------------

    def readiness(self) -> Readiness:
        reasons: list[str] = []
        for address, watch in sorted(self._watches.items()):
            problem = decode_problem(self._decodes[address], watch)
            cells = [cell for cell in self._cells if cell.pair.decode == address]
            whys = [problem] if problem else [why for cell in cells if (why := self._why_not(cell))]
            reasons += [f"decode {address}: {why}" for why in dict.fromkeys(whys)]
        if self._registry.view.problem:
            reasons.append(self._registry.view.problem)
        return Readiness(tuple(cell.pair for cell in self._usable()), tuple(reasons))

    def max_model_tokens(self) -> int:
        stated = (watch.max_model_tokens for watch in self._watches.values())
        return min((limit for limit in stated if limit), default=0)

    def view(self) -> FleetView:
        registry = self._registry.view
        return FleetView(
            version=registry.version,
            problem=registry.problem,
            pods=tuple(self._pod_views()),
            pairs=tuple(
                PairView(
                    pair=cell.pair,
                    state=cell.state,
                    reason=self._why_not(cell),
                    usable=not self._why_not(cell),
                    breaker=self._breaker_state(cell.pair).value,
                    in_flight=self._loads.on_pair(cell.pair),
                )
                for cell in self._cells
            ),
            waiting=self._admission.num_waiting,
            in_flight=self._loads.in_flight(),
        )

    def _pod_views(self) -> Iterator[PodView]:
        for address, watch in sorted(self._watches.items()):
            problem = decode_problem(self._decodes[address], watch)
            load = self._decode_load(address)
            yield self._pod_view(Role.DECODE, address, self._decodes[address], load, problem, watch)
        loads = {cell.pair.prefill: self._prefill_load(cell) for cell in self._cells}
        for address in sorted(loads.keys() | self._prefills.keys()):
            record = self._prefills.get(address)
            load = loads.get(address, Load(self._loads.total(address), 0))
            yield self._pod_view(Role.PREFILL, address, record, load, "", None)

    def _pod_view(
        self,
        role: Role,
        address: str,
        record: PodRecord | None,
        load: Load,
        problem: str,
        watch: DecodeWatch | None,
    ) -> PodView:
        return PodView(
            role=role,
            address=address,
            name=record.name if record else "",
            state=record.state if record else None,
            in_flight=self._loads.own(address),
            in_use=load.in_use,
            capacity=load.capacity,
            problem=problem,
            status=watch.status if watch else None,
        )

    # -- handing out pairs ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(
        self, prompt: tuple[int, ...], deadline: float, avoid: Collection[Pair] = ()
    ) -> AsyncIterator[Lease]:
        """See `PairSource.lease`."""
        if self._hopeless:
            raise self._not_ready()
        lease = await self._admission.enter(lambda: self._take(prompt, avoid), deadline)
        try:
            yield lease
        finally:
            lease.close()

    def _take(self, prompt: tuple[int, ...], avoid: Collection[Pair]) -> Lease | None:
        """Both pods of a pair or none: nothing here waits between the choice and the counting."""
        now = asyncio.get_running_loop().time()
        free = [c for c in self._candidates() if self._breaker(c.pair).admits(now)]
        if not free:
            return None
        chosen = self._policy.choose([c for c in free if c.pair not in avoid] or free, prompt)
        return self._lease(chosen.pair, now)

    def _candidates(self) -> Iterator[Candidate]:
        for cell in self._open:
            decode, prefill = self._decode_load(cell.pair.decode), self._prefill_load(cell)
            if not (decode.full or prefill.full):
                yield Candidate(cell.pair, decode, prefill, self._last_pick.get(cell.pair, 0))

    def _lease(self, pair: Pair, now: float) -> Lease:
        loop = asyncio.get_running_loop()
        watch, breaker = self._watches[pair.decode], self._breaker(pair)
        probe = breaker.enter()
        self._last_pick[pair] = next(self._picks)
        self._loads.enter(pair)
        watch.enter()

        def verdict(error: SluiceError | None) -> None:
            if error is None:
                breaker.passed(probe)
                return
            watch.look_again()
            if counts_against_pair(error):
                breaker.failed(probe, loop.time())

        def prefill_done() -> None:
            self._loads.leave_prefill(pair)
            self._admission.pump()

        def closed() -> None:
            breaker.leave(probe)
            self._loads.leave(pair)
            self._admission.left(loop.time() - now)
            watch.leave()
            if breaker.state is BreakerState.CLOSED:  # nothing but the load has changed
                self._admission.pump()
            else:
                self._changed()

        return Lease(pair, watch.client, prefill_done=prefill_done, verdict=verdict, closed=closed)

    def _not_ready(self) -> NotReady:
        why = "; ".join(self.readiness().reasons) or "no decode pod is known"
        pause_s = self._opens_in_s() or self._config.refresh_s
        return NotReady(f"no agreed pair: {why}", stage="pair", retry_after_s=pause_s)

    def _decode_load(self, address: str) -> Load:
        status = self._watches[address].status
        capacity = self._config.max_in_flight or (status.capacity if status else 0)
        return Load(self._loads.total(address), capacity)

    def _prefill_load(self, cell: Cell) -> Load:
        address, said = cell.pair.prefill, cell.peer.prefill if cell.peer else None
        return Load(self._loads.total(address), said.capacity if said else 0)

    # -- breakers -------------------------------------------------------------------------------------------

    def _breaker(self, pair: Pair) -> Breaker:
        if pair not in self._breakers:
            self._breakers[pair] = Breaker(str(pair), self._config.breaker)
        return self._breakers[pair]

    def _breaker_state(self, pair: Pair) -> BreakerState:
        return self._breakers[pair].state if pair in self._breakers else BreakerState.CLOSED

    def _usable(self) -> list[Cell]:
        return [cell for cell in self._cells if not self._why_not(cell)]

    def _why_not(self, cell: Cell) -> str:
        if cell.reason or cell.pair not in self._breakers:
            return cell.reason
        left_s = self._breakers[cell.pair].opens_in_s(asyncio.get_running_loop().time())
        if left_s:
            return f"prefill {cell.pair.prefill}: requests failed there, next try in {left_s:.1f} s"
        return ""

    def _opens_in_s(self) -> float:
        """Until the next open breaker lets a probe through; 0 = none is open."""
        now = asyncio.get_running_loop().time()
        times = (breaker.opens_in_s(now) for breaker in self._breakers.values())
        return min((left_s for left_s in times if left_s), default=0.0)

    # -- changes --------------------------------------------------------------------------------------------

    def _on_pods(self, view: RegistryView) -> None:
        """Before this returns, no pod that has gone or drains can be picked."""
        self._decodes, self._prefills = view.of(Role.DECODE), view.of(Role.PREFILL)
        for address in self._decodes.keys() - self._watches.keys():
            client = self._connect(address)
            self._watches[address] = DecodeWatch(client, self._config.refresh_s, self._on_status)
        for address in self._watches.keys() - self._decodes.keys():
            self._spawn(self._watches.pop(address).retire())
        self._changed()

    def _on_status(self, watch: DecodeWatch) -> None:
        if (status := watch.status) is not None:
            self._loads.heard(watch.client.address, status.queued + status.running)
            for peer in status.peers:
                if peer.prefill is not None:
                    in_use = peer.prefill.queued + peer.prefill.running
                    self._loads.heard(peer.address, in_use)
        self._changed()

    def _changed(self) -> None:
        """Draw the matrix anew, forget what is in it no more, and let those in who can go."""
        self._cells = settled(
            [
                cell
                for address, watch in sorted(self._watches.items())
                for cell in cells_of(
                    self._decodes[address],
                    watch,
                    self._prefills,
                    any_prefill=self._config.any_prefill,
                )
            ]
        )
        self._open = [cell for cell in self._cells if not cell.reason]
        pairs = {cell.pair for cell in self._cells}
        self._breakers = {p: breaker for p, breaker in self._breakers.items() if p in pairs}
        self._last_pick = {p: pick for p, pick in self._last_pick.items() if p in pairs}
        self._loads.forget_others(self._watches.keys() | {pair.prefill for pair in pairs})
        self._set_timers()
        self._admission.pump()

    def _set_timers(self) -> None:
        """Look again when a breaker lets a probe through; end all waits when nothing has been usable for long."""
        loop = asyncio.get_running_loop()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None
        if opens_in_s := self._opens_in_s():
            self._probe_timer = loop.call_later(opens_in_s, self._changed)
        if self._usable():
            self._hopeless = False
            if self._despair is not None:
                self._despair.cancel()
                self._despair = None
        elif self._despair is None and not self._hopeless:
            self._despair = loop.call_later(self._config.pair_wait_s, self._give_up)

    def _give_up(self) -> None:
        self._despair, self._hopeless = None, True
        self._admission.fail(self._not_ready)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
