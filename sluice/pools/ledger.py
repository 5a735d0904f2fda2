"""Which request holds which items of one allocator, within what it was promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.errors import PoolError
from sluice.layout.component import Space
from sluice.pools.allocator import ItemState, PageAllocator


@dataclass
class _Account:
    promised: int
    items: set[int] = field(default_factory=set)
    quarantined: bool = False


class Ledger:
    """Accounts, one a request, named by slot: a retried request id may have old items quarantined."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self._accounts: dict[int, _Account] = {}

    @property
    def space(self) -> Space:
        return self.allocator.space

    def open(self, slot: int, promised: int) -> None:
        """Promise items to ``slot``. Raises ``PoolError`` when it is open or they don't exist."""
        if slot in self._accounts:
            raise PoolError(f"{self.space.value}: slot {slot} is open already")
        self.allocator.promise(promised)
        self._accounts[slot] = _Account(promised)

    def can_raise(self, slot: int, promised: int) -> bool:
        """Whether ``slot``'s promise can become ``promised`` items, or is that large already."""
        return self.allocator.can_promise(max(0, promised - self._usable(slot).promised))

    def raise_to(self, slot: int, promised: int) -> None:
        """Raise a promise, never lower it. Raises ``PoolError`` where ``can_raise`` says no."""
        account = self._usable(slot)
        self.allocator.promise(max(0, promised - account.promised))
        account.promised = max(promised, account.promised)

    def take(self, slot: int, count: int, after: int = 0) -> list[int]:
        """Items for ``slot``, never more than its promise (else ``PoolError``)."""
        account = self._usable(slot)
        if len(account.items) + count > account.promised:
            raise PoolError(
                f"{self.space.value}: slot {slot} holds {len(account.items)} of "
                f"{account.promised} promised items and asks for {count} more",
                remedy="open with a larger max_tokens, and advance after every commit",
            )
        items = self.allocator.take(count, after)
        account.items.update(items)
        return items

    def free(self, slot: int, items: Sequence[int]) -> None:
        """Give back some items, keep the promise. Raises ``PoolError`` for one it doesn't hold."""
        account = self._usable(slot)
        strangers = set(items) - account.items
        if strangers:
            raise PoolError(
                f"{self.space.value} item {min(strangers)} isn't held by slot {slot} "
                f"and can't be freed by it"
            )
        self.allocator.free(items)
        account.items.difference_update(items)

    def quarantine(self, slot: int) -> None:
        """Set all of a slot's items apart; what it never took goes back to everybody."""
        account = self._usable(slot)
        self.allocator.quarantine(sorted(account.items))
        self.allocator.withdraw(account.promised - len(account.items))
        account.promised, account.quarantined = len(account.items), True

    def close(self, slot: int) -> None:
        """Free all of a slot's items, from use or from quarantine, and end its promise."""
        account = self._account(slot)
        if account.quarantined:
            self.allocator.release(sorted(account.items))
        else:
            self.allocator.free(sorted(account.items))
        self.allocator.withdraw(account.promised)
        del self._accounts[slot]

    def items(self, slot: int) -> frozenset[int]:
        return frozenset(self._account(slot).items)

    def check_listed(self, slot: int, items: Sequence[int]) -> None:
        """A request's own table lists each item it holds once. Raises ``PoolError``."""
        if sorted(items) != sorted(self._account(slot).items):
            raise PoolError(
                f"{self.space.value}: slot {slot} lists items {sorted(items)} and "
                f"holds {sorted(self._account(slot).items)}"
            )

    def check(self) -> None:
        """Every item in use has exactly one owner, in the matching state. Raises ``PoolError``."""
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
        occupancy = self.allocator.occupancy()
        in_use = occupancy.held + occupancy.quarantined
        promised = sum(account.promised for account in self._accounts.values())
        if in_use != len(owner) or promised != self.allocator.promised:
            raise PoolError(
                f"{self.space.value}: {in_use} items in use and {len(owner)} owned, "
                f"{self.allocator.promised} promised and {promised} on account"
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
