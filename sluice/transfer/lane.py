"""One peer as the I/O thread sees it: tickets that take turns, and the groups that are posted to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.transfer.plane import Handle, Link
from sluice.transfer.ticket import Ticket


@dataclass
class Posted:
    """``expired``: the caller was told; the handle stays here until it settles, and so does its staging slot."""

    handle: Handle
    ticket: Ticket
    num_bytes: int
    deadline: float
    slot: int | None = None
    expired: bool = False


@dataclass
class Lane:
    """One peer. Its endpoint is first in, first out, so the window is per peer and tickets take turns in it."""

    link: Link
    tickets: list[Ticket] = field(default_factory=list)
    in_flight: list[Posted] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return bool(self.tickets or self.in_flight)

    def next_ticket(self) -> Ticket | None:
        """The next ticket with something to post; it moves to the back of the line."""
        for ticket in self.tickets:
            if ticket.wants_post:
                self.tickets = [other for other in self.tickets if other is not ticket] + [ticket]
                return ticket
        return None
