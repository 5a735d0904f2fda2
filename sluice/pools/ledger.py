"""Which request holds which items of one allocator, within what it was promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field

from sluice.errors import PoolError
from sluice.layout.component import Space
from sluice.pools.allocator import ItemState, PageAllocator


@dataclass
class _Account:
    promised: int  # of its own, taken or not
    items: set[int] = field(default_factory=set)  # its own: nobody else reads or writes them
    shared: set[int] = field(default_factory=set)  # kept ones: read only, others may hold them too
    quarantined: bool = False


class Ledger:
    """Accounts, one a request, named by slot: a retried request id may have old items quarantined.

    An account can also *share* items: those are kept after its end, and other accounts may begin with
    them. However many hold a kept item, it is promised once; held by nobody it is cached, promised to
    nobody, and evicted when items run out.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self._accounts: dict[int, _Account] = {}
        self._holders: dict[int, int] = {}  # of each kept item; 0 = it is cached
        self._evict_some: Callable[[int], None] | None = None

    @property
    def space(self) -> Space:
        return self.allocator.space

    def evict_with(self, evict_some: Callable[[int], None]) -> None:
        """``evict_some(n)`` is called where n more items must be free; it calls ``evict`` for cached
        ones until they are.
        """
        self._evict_some = evict_some

    def can_open(self, promised: int, shared: Sequence[int] = ()) -> bool:
        return self.allocator.can_promise(promised - len(shared) + len(self._cached(shared)))

    def open(self, slot: int, promised: int, shared: Sequence[int] = ()) -> None:
        """Promise items to ``slot``, of which it begins with the kept items ``shared``.

        Raises ``PoolError`` when it is open, or they don't exist or aren't kept.
        """
        if slot in self._accounts:
            raise PoolError(f"{self.space.value}: slot {slot} is open already")
        cached = self._cached(shared)
        self.allocator.promise(promised - len(shared) + len(cached))
        self.allocator.reuse(cached)
        for item in shared:
            self._holders[item] += 1
        self._accounts[slot] = _Account(promised - len(shared), shared=set(shared))

    def can_raise(self, slot: int, promised: int) -> bool:
        """Whether ``slot``'s promise can become ``promised`` items, or is that large already."""
        return self.allocator.can_promise(self._missing(self._usable(slot), promised))

    def raise_to(self, slot: int, promised: int) -> None:
        """Raise a promise, never lower it. Raises ``PoolError`` where ``can_raise`` says no."""
        account = self._usable(slot)
        missing = self._missing(account, promised)
        self.allocator.promise(missing)
        account.promised += missing

    def take(self, slot: int, count: int, after: int = 0) -> list[int]:
        """Items for ``slot``, never more than its promise (else ``PoolError``)."""
        account = self._usable(slot)
        if len(account.items) + count > account.promised:
            raise PoolError(
                f"{self.space.value}: slot {slot} holds {len(account.items)} of "
                f"{account.promised} promised items and asks for {count} more",
                remedy="open with a larger max_tokens, and advance after every commit",
            )
        missing = count - self.allocator.num_free
        if missing > 0 and self._evict_some is not None:
            self._evict_some(missing)
        items = self.allocator.take(count, after)
        account.items.update(items)
        return items

    def share(self, slot: int, items: Sequence[int]) -> None:
        """Keep items of ``slot``'s own: it writes them no more, and others may begin with them.

        Raises ``PoolError`` for one it doesn't hold.
        """
        account = self._usable(slot)
        self._check_own(slot, account, items, "shared")
        account.items.difference_update(items)
        account.shared.update(items)
        account.promised -= len(items)
        self._holders.update((item, 1) for item in items)

    def holders(self, item: int) -> int:
        """How many accounts hold a kept item. Raises ``PoolError`` for one that isn't kept."""
        if item not in self._holders:
            raise PoolError(f"{self.space.value} item {item} isn't kept")
        return self._holders[item]

    def evict(self, item: int) -> None:
        """Forget and free a cached item. Raises ``PoolError`` for one that somebody holds."""
        if self.holders(item):
            raise PoolError(
                f"{self.space.value} item {item} can't be evicted: "
                f"{self.holders(item)} requests hold it"
            )
        self.allocator.evict([item])
        del self._holders[item]

    def free(self, slot: int, items: Sequence[int]) -> None:
        """Give back some items, keep the promise. Raises ``PoolError`` for one it doesn't hold."""
        account = self._usable(slot)
        self._check_own(slot, account, items, "freed")
        self.allocator.free(items)
        account.items.difference_update(items)

    def quarantine(self, slot: int) -> None:
        """Set a slot's own items apart; what it never took goes back to everybody. Kept ones stay as
        they are: nobody writes those.
        """
        account = self._usable(slot)
        self.allocator.quarantine(sorted(account.items))
        self.allocator.withdraw(account.promised - len(account.items))
        account.promised, account.quarantined = len(account.items), True

    def close(self, slot: int) -> None:
        """Free a slot's own items, from use or from quarantine, and end its promise. Kept ones that
        nobody else holds are cached.
        """
        account = self._account(slot)
        if account.quarantined:
            self.allocator.release(sorted(account.items))
        else:
            self.allocator.free(sorted(account.items))
        for item in account.shared:
            self._holders[item] -= 1
        cached = self._cached(account.shared)
        self.allocator.cache(cached)
        self.allocator.withdraw(account.promised + len(cached))
        del self._accounts[slot]

    def items(self, slot: int) -> frozenset[int]:
        return frozenset(self._account(slot).items | self._account(slot).shared)

    def check_listed(self, slot: int, items: Sequence[int]) -> None:
        """A request's own table lists each item it holds once. Raises ``PoolError``."""
        held = sorted(self.items(slot))
        if sorted(items) != held:
            raise PoolError(
                f"{self.space.value}: slot {slot} lists items {sorted(items)} and holds {held}"
            )

    def check(self) -> None:
        """Every item in use has exactly one owner, in the matching state; every kept one is counted
        by who holds it. Raises ``PoolError``.
        """
        self.allocator.check()
        owner: dict[int, int] = {}
        for slot, account in self._accounts.items():
            expected = ItemState.QUARANTINED if account.quarantined else ItemState.HELD
            for item in account.items:
                state = self.allocator.state(item)
                if item in owner or state is not expected:
                    raise PoolError(
                        f"{self.space.value} item {item} of slot {slot} is {state.value}, "
                        f"expected {expected.value} and one owner (other: {owner.get(item)})"
                    )
                owner[item] = slot
        held = self._check_kept(owner)
        occupancy = self.allocator.occupancy()
        in_use, owned = occupancy.held + occupancy.quarantined, len(owner) + held
        promised = sum(account.promised for account in self._accounts.values()) + held
        if in_use != owned or promised != self.allocator.promised:
            raise PoolError(
                f"{self.space.value}: {in_use} items in use and {owned} owned, "
                f"{self.allocator.promised} promised and {promised} on account"
            )

    def _check_kept(self, owner: Container[int]) -> int:
        """Kept items against the accounts; how many somebody holds."""
        counted = Counter(item for account in self._accounts.values() for item in account.shared)
        for item, holders in self._holders.items():
            expected = ItemState.HELD if holders else ItemState.CACHED
            state = self.allocator.state(item)
            if counted[item] != holders or state is not expected or item in owner:
                raise PoolError(
                    f"{self.space.value} kept item {item} is {state.value}, booked for {holders} "
                    f"requests and held by {counted[item]}"
                )
        if strangers := counted.keys() - self._holders.keys():
            raise PoolError(f"{self.space.value} item {min(strangers)} is shared but not kept")
        return len(counted)

    def _cached(self, kept: Collection[int]) -> list[int]:
        """Those of some kept items that nobody holds."""
        return sorted(item for item in kept if not self.holders(item))

    @staticmethod
    def _missing(account: _Account, promised: int) -> int:
        return max(0, promised - account.promised - len(account.shared))

    def _check_own(self, slot: int, account: _Account, items: Sequence[int], what: str) -> None:
        strangers = set(items) - account.items
        if strangers:
            raise PoolError(
                f"{self.space.value} item {min(strangers)} isn't held by slot {slot} "
                f"and can't be {what} by it"
            )

    def _account(self, slot: int) -> _Account:
        if slot not in self._accounts:
            raise PoolError(f"{self.space.value}: slot {slot} is not open")
        return self._accounts[slot]

    def _usable(self, slot: int) -> _Account:
        account = self._account(slot)
        if account.quarantined:
            raise PoolError(
                f"{self.space.value}: slot {slot} is quarantined; close is all it can do"
            )
        return account
