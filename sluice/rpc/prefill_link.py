"""A decode pod's view of one prefill pod, in plain data: handshake, ping, drain, and one stream an attempt."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from sluice.errors import PeerLost, SluiceError
from sluice.layout.layout import Layout
from sluice.rpc.channel import ChannelConfig
from sluice.rpc.client import PrefillClient, RunCall
from sluice.rpc.convert import endpoint_to_pb, failure_from_pb, layout_from_pb, layout_to_pb
from sluice.rpc.convert_attempt import complete_from_pb, start_to_pb
from sluice.rpc.convert_status import prefill_status_from_pb
from sluice.rpc.messages import PrefillStatus
from sluice.transfer.messages import AttemptComplete, AttemptStart
from sluice.transfer.plane import Endpoint
from sluice.types import AttemptId, Epoch
from sluice.v1 import prefill_pb2


@dataclass(frozen=True)
class HandshakeAnswer:
    """``agreement_digest`` is empty when prefill refused."""

    layout: Layout
    epoch: Epoch
    agreement_digest: str


@dataclass(frozen=True)
class PingAnswer:
    """``paired`` is False when prefill knows no pairing with the asker's epoch; ``status`` is its own word."""

    epoch: Epoch
    paired: bool
    status: PrefillStatus | None


@dataclass(frozen=True)
class DrainAnswer:
    """Of the attempts asked for, those that can write no more."""

    epoch: Epoch
    drained: tuple[AttemptId, ...]


class PrefillLink:
    """One channel. Every call has a deadline and raises ``SluiceError``."""

    def __init__(self, address: str, config: ChannelConfig | None = None) -> None:
        self.address = address
        self._client = PrefillClient(address, config)

    async def close(self) -> None:
        await self._client.close()

    async def handshake(
        self,
        layout: Layout,
        epoch: Epoch,
        endpoints: tuple[Endpoint, ...],
        *,
        allow_missing_draft: bool,
        timeout_s: float,
    ) -> HandshakeAnswer:
        request = prefill_pb2.HandshakeRequest(
            layout=layout_to_pb(layout),
            epoch=epoch,
            endpoints=[endpoint_to_pb(endpoint) for endpoint in endpoints],
            allow_missing_draft=allow_missing_draft,
        )
        answer = await self._client.handshake(request, timeout_s)
        return HandshakeAnswer(
            layout_from_pb(answer.layout), Epoch(answer.epoch), answer.agreement_digest
        )

    async def ping(self, epoch: Epoch, timeout_s: float) -> PingAnswer:
        answer = await self._client.ping(prefill_pb2.PingRequest(epoch=epoch), timeout_s)
        status = prefill_status_from_pb(answer.status) if answer.HasField("status") else None
        return PingAnswer(Epoch(answer.epoch), answer.paired, status)

    async def drain(
        self, epoch: Epoch, attempts: tuple[AttemptId, ...], timeout_s: float
    ) -> DrainAnswer:
        request = prefill_pb2.DrainRequest(decode_epoch=epoch, attempt_ids=attempts)
        answer = await self._client.drain(request, timeout_s)
        return DrainAnswer(
            Epoch(answer.prefill_epoch), tuple(AttemptId(attempt) for attempt in answer.drained)
        )

    def run(self, start: AttemptStart, timeout_s: float) -> AttemptStream:
        """Open the stream of one attempt and say Start."""
        return AttemptStream(self._client.run(timeout_s), start)


class AttemptStream:
    """One attempt's stream, read to its end by one task: cancelling a gRPC read would cancel the call.

    ``outcome`` may be awaited by several and cancelled freely; only ``cancel`` ends the stream.
    """

    def __init__(self, call: RunCall, start: AttemptStart) -> None:
        self._call = call
        self._reader = asyncio.create_task(self._read(start))

    async def outcome(self) -> AttemptComplete | SluiceError | None:
        """Complete; or a failure of prefill's that has settled; or None for Drained.

        Raises ``PeerLost`` (or what gRPC said) when the stream broke: then nothing is known about its writes.
        """
        return await asyncio.shield(self._reader)

    async def abort(self, reason: str) -> AttemptComplete | SluiceError | None:
        """Ask prefill to stop and wait for its last word; it may have crossed the abort."""
        abort = prefill_pb2.RunRequest(abort=prefill_pb2.Abort(reason=reason))
        if not self._reader.done():
            # The stream is over: its last word may be waiting.
            with contextlib.suppress(SluiceError):
                await self._call.send(abort)
        return await self.outcome()

    def cancel(self) -> None:
        self._reader.cancel()
        self._call.cancel()
        # A failure nobody asked for any more is not worth a warning at collection.
        self._reader.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _read(self, start: AttemptStart) -> AttemptComplete | SluiceError | None:
        await self._call.send(prefill_pb2.RunRequest(start=start_to_pb(start)))
        async for response in self._call:
            match response.WhichOneof("message"):
                case "complete":
                    return complete_from_pb(response.complete)
                case "failed":
                    return failure_from_pb(response.failed)
                case "drained":
                    return None
                case _:
                    continue  # Accepted
        raise PeerLost("prefill ended the stream without a last word", stage="transfer")
