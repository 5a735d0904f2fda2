"""The receiving process of ``bench.transfer`` for what NIXL is compared with: a raw TCP socket, a gRPC stream.

``python -m bench.transfer_peer tcp|grpc NUM_BYTES`` prints one JSON line that says how to reach it.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
from numpy.typing import NDArray

METHOD = "/bench.Transfer/Push"
_BLOCK = 1 << 20


def serve_tcp(num_bytes: int) -> None:
    """Read ``num_bytes`` at a time into one buffer, answer each with one byte."""
    memory = np.zeros(num_bytes, dtype=np.uint8)
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    view = memoryview(memory.data)
    while True:
        at = 0
        while at < num_bytes:
            got = connection.recv_into(view[at : min(at + _BLOCK, num_bytes)])
            if not got:
                return
            at += got
        connection.sendall(b"k")


class _Push(grpc.GenericRpcHandler):
    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return grpc.stream_unary_rpc_method_handler(self._receive)

    def _receive(self, messages: Iterator[bytes], _context: grpc.ServicerContext) -> bytes:
        at = 0
        for message in messages:
            self._memory[at : at + len(message)] = np.frombuffer(message, dtype=np.uint8)
            at += len(message)
        return at.to_bytes(8, "little")


def serve_grpc(num_bytes: int) -> None:
    """A client stream of raw messages, copied into one buffer."""
    memory = np.zeros(num_bytes, dtype=np.uint8)
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((_Push(memory),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(json.dumps({"port": port}), flush=True)
    sys.stdin.read()
    server.stop(0)


if __name__ == "__main__":
    serve = {"tcp": serve_tcp, "grpc": serve_grpc}[sys.argv[1]]
    serve(int(sys.argv[2]))
