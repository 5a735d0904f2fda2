"""The recurrence against its definition; the chunked form against the recurrence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sluice.models.kimi_linear.delta import Writes, chunked, scan, unit

H, K, V = 2, 5, 7


def _writes(rows: int, steps: int, *, seed: int = 0, decay: float = 1.0) -> tuple[Writes, Tensor]:
    g = torch.Generator().manual_seed(seed)
    writes = Writes(
        k=unit(torch.randn(rows, steps, H, K, generator=g)),
        v=torch.randn(rows, steps, H, V, generator=g),
        g=-decay * torch.rand(rows, steps, H, K, generator=g),
        beta=torch.rand(rows, steps, H, generator=g),
    )
    return writes, unit(torch.randn(rows, steps, H, K, generator=g))


def _by_definition(state: Tensor, writes: Writes, q: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's four lines for one row, in float64 and with explicit matrices."""
    state, out = state.double(), []
    for t in range(q.shape[0]):
        heads = []
        for h in range(H):
            k, v = writes.k[t, h].double(), writes.v[t, h].double()
            s = torch.diag(writes.g[t, h].double().exp()) @ state[h]
            s = s + torch.outer(k, writes.beta[t, h].double() * (v - s.T @ k))
            heads.append((s, s.T @ q[t, h].double()))
        state = torch.stack([s for s, _ in heads])
        out.append(torch.stack([o for _, o in heads]))
    return state, torch.stack(out)


def test_scan_is_the_definition() -> None:
    writes, q = _writes(1, 9)
    start = torch.randn(1, H, K, V)
    state, out = scan(start, writes, q)
    want_state, want_out = _by_definition(start[0], writes[torch.tensor(0)], q[0])
    assert out is not None
    torch.testing.assert_close(state[0].double(), want_state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[0].double(), want_out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 50])
@pytest.mark.parametrize("decay", [0.1, 40.0])
def test_chunks_equal_the_scan(length: int, decay: float) -> None:
    """Also where decays are so strong that e^-G would overflow."""
    writes, q = _writes(1, length, decay=decay)
    start = torch.randn(1, H, K, V)
    state, out = scan(start, writes, q)
    one = writes[torch.tensor(0)]
    state_c, out_c = chunked(start[0], one, q[0])
    assert out is not None
    assert out_c.isfinite().all()
    torch.testing.assert_close(state_c, state[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out_c, out[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_bits_depend_on_neither_neighbours_nor_the_width_of_a_call(rows: int) -> None:
    """What makes a verified token's state that of a plain decode."""
    steps = 6
    writes, q = _writes(rows, steps)
    start = torch.randn(rows, H, K, V)
    _, together = scan(start, writes, q)
    assert together is not None
    for row in range(rows):
        state = start[row : row + 1]
        for step in range(steps):
            here = (slice(row, row + 1), slice(step, step + 1))
            one = Writes(writes.k[here], writes.v[here], writes.g[here], writes.beta[here])
            state, out = scan(state, one, q[here])
            assert out is not None
            assert torch.equal(out[0, 0], together[row, step])
            replayed, nothing = scan(
                start, Writes(*(x[:, : step + 1] for x in vars(writes).values())), None
            )
            assert nothing is None
            assert torch.equal(state[0], replayed[row])


def test_skipped_tokens_leave_the_state_bit_for_bit() -> None:
    writes, _ = _writes(2, 4)
    writes.v[1, 2:] = float("nan")  # padding repeats some token; it must not even be multiplied
    real = torch.tensor([[True] * 4, [True, True, False, False]])
    start = torch.randn(2, H, K, V)
    state, _ = scan(start, writes.only(real), None)
    short, _ = scan(start, Writes(*(x[:, :2] for x in vars(writes).values())), None)
    full, _ = scan(start[:1], writes[slice(0, 1)], None)
    assert torch.equal(state[1], short[1])
    assert torch.equal(state[0], full[0])


def test_unit_has_its_epsilon_inside_the_root() -> None:
    x = torch.tensor([3e-4, 4e-4])
    torch.testing.assert_close(unit(x), x / (25e-8 + 1e-6) ** 0.5)
    assert torch.equal(unit(torch.zeros(3)), torch.zeros(3))
