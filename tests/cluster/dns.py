"""The cluster's DNS for tests: ``<service>.<namespace>.svc.cluster.local`` to its cluster IP, or its pods' if headless.

``python -m tests.cluster.dns KUBECONFIG ADDRESS``. CoreDNS is in no package; this answers what the tests ask.
"""

from __future__ import annotations

import ipaddress
import socketserver
import struct
import sys

from kubernetes import client, config

_SUFFIX = ("svc", "cluster", "local")
_A, _IN, _TTL_S = 1, 1, 2
_NO_SUCH_NAME = 3


class Resolver:
    """Asks the API server for every name; nothing is cached."""

    def __init__(self, kubeconfig: str) -> None:
        config.load_kube_config(kubeconfig)
        self._api = client.CoreV1Api()

    def addresses(self, name: str) -> list[str] | None:
        """None: no such name."""
        parts = name.rstrip(".").lower().split(".")
        if tuple(parts[-3:]) != _SUFFIX or len(parts) != 5:
            return None
        service, namespace = parts[:2]
        try:
            found = self._api.read_namespaced_service(service, namespace)
            if found.spec.cluster_ip != "None":
                return [found.spec.cluster_ip]
            endpoints = self._api.read_namespaced_endpoints(service, namespace)
        except client.exceptions.ApiException:
            return None
        return [a.ip for subset in endpoints.subsets or () for a in subset.addresses or ()]


def answer(query: bytes, resolver: Resolver) -> bytes:
    """One DNS message for another: RFC 1035, a single question, A records only."""
    identity, labels, at = query[:2], [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii", "replace"))
        at += query[at] + 1
    question = query[12 : at + 5]
    (kind,) = struct.unpack("!H", query[at + 1 : at + 3])
    found = resolver.addresses(".".join(labels))
    addresses = found if found is not None and kind == _A else []
    code = 0x8400 | (_NO_SUCH_NAME if found is None else 0)  # an authoritative answer
    head = identity + struct.pack("!HHHHH", code, 1, len(addresses), 0, 0)
    records = b"".join(
        b"\xc0\x0c" + struct.pack("!HHIH", _A, _IN, _TTL_S, 4) + ipaddress.IPv4Address(a).packed
        for a in addresses
    )
    return head + question + records


def main() -> None:
    resolver = Resolver(sys.argv[1])

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            query, socket = self.request
            socket.sendto(answer(query, resolver), self.client_address)

    with socketserver.ThreadingUDPServer((sys.argv[2], 53), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
