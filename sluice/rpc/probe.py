"""``python -m sluice.rpc.probe HOST:PORT [SERVICE]``: `grpc.health.v1` for probes that run a command.

Small on purpose: Kubernetes starts it every few seconds. 0 serving, 1 not, with the reason on stderr. A pod that
speaks TLS is asked on its plain health port (``SLUICE_<ROLE>_HEALTH_LISTEN``).
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2

_TIMEOUT_S = 3.0


def main(argv: list[str]) -> int:
    address, service = argv[0], (argv[1] if len(argv) > 1 else "")
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            print(f"{address} {service!r}: {error.code().name}", file=sys.stderr)
            return 1
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        print(f"{address} {service!r} is not serving", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
