"""How many pages fit into a budget of bytes on one rank, and where the bytes go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.config import PoolConfig
from sluice.errors import ConfigError
from sluice.layout.columns import columns, size
from sluice.layout.component import Component, Space
from sluice.pools.base import BufferSpec
from sluice.pools.specs import components_of


@dataclass(frozen=True)
class Solution:
    """``num_pages`` allocator pages fit. ``pages`` and ``fixed``: bytes by name, of one page and in all."""

    num_pages: int
    page_tokens: int
    pages: tuple[tuple[str, int], ...]
    fixed: tuple[tuple[str, int], ...]
    budget_bytes: int

    @property
    def page_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.pages)

    @property
    def num_tokens(self) -> int:
        """Tokens of history, over all context-parallel ranks."""
        return self.num_pages * self.page_tokens

    def text(self) -> str:
        """The solution as a table: what a page takes, what is taken whatever is served, what is left over."""
        rows = [("page of", f"{self.page_tokens} tokens", size(self.page_bytes))]
        rows += [("", name, size(num_bytes)) for name, num_bytes in self.pages]
        fixed = sum(num_bytes for _, num_bytes in self.fixed)
        rows.append(("fixed", "", size(fixed)))
        rows += [("", name, size(num_bytes)) for name, num_bytes in self.fixed]
        left = self.budget_bytes - fixed - self.num_pages * self.page_bytes
        rows.append(
            ("pages", f"{self.num_pages}, {self.num_tokens} tokens", size(self.budget_bytes))
        )
        rows.append(("left over", "", size(left)))
        return "\n".join(columns(rows, right=frozenset({2})))


def solve(
    needs: Sequence[BufferSpec],
    config: PoolConfig,
    verify_tokens: int,
    budget_bytes: int,
    workspace: Sequence[tuple[str, int]] = (),
) -> Solution:
    """The most pages for ``budget_bytes`` of one rank, beside slots, the padding page and ``workspace``
    (bytes by name, such as an attention's partial results).

    A page has ``page_tokens`` rows of what is dealt to context-parallel ranks, and as many times that of what
    isn't: a draft's keys take ``context`` times the rows. Raises ``ConfigError`` when not one page fits.
    """
    components = components_of(needs, config, verify_tokens)
    paged = [c for c in components if c.space is Space.PAGE]
    pages = tuple((c.name, _item_bytes(c)) for c in paged)
    page_bytes = sum(num_bytes for _, num_bytes in pages)
    others = [(c.name, _item_bytes(c) * c.num_items) for c in components if c not in paged]
    fixed = (("padding page", page_bytes), *others, *workspace)
    left = budget_bytes - sum(num_bytes for _, num_bytes in fixed)
    if not page_bytes or left < page_bytes:
        raise ConfigError(
            f"{budget_bytes} bytes of state hold no page of {page_bytes} bytes beside "
            f"{budget_bytes - left} that are always taken",
            stage="pools",
            remedy="give the pod more bytes, or fewer slots",
        )
    tokens = config.allocator_page_tokens
    return Solution(left // page_bytes, tokens, pages, fixed, budget_bytes)


def _item_bytes(component: Component) -> int:
    return component.bytes_per_row * component.rows_per_item // component.interleave


def attention_workspace_bytes(heads: int, query_rows: int, latent_dim: int) -> int:
    """Partial outputs and their log-sums, float32, of ``query_rows`` rows for the heads of all ranks that
    share a history: a rank attends for all of them before the parts are merged.
    """
    return heads * query_rows * (latent_dim + 1) * 4
