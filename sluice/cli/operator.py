"""The certificate with which the command line calls pods that speak TLS."""

from __future__ import annotations

import argparse
from pathlib import Path

from sluice.errors import ConfigError
from sluice.rpc.channel import ChannelConfig
from sluice.rpc.tls import PeerRole, Tls, tls_files


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """``--tls-cert``, ``--tls-key`` and ``--tls-ca``: all three or none."""
    for name, what in (
        ("cert", "certificate with the DNS name operator.sluice, for pods that speak TLS"),
        ("key", "its key"),
        ("ca", "the CA that signed the pods' certificates"),
    ):
        parser.add_argument(f"--tls-{name}", type=Path, metavar="PEM", help=what)


def channel_of(args: argparse.Namespace) -> ChannelConfig | None:
    """None for pods that speak plain text. Raises `ConfigError`."""
    try:
        files = tls_files(args.tls_cert, args.tls_key, args.tls_ca)
    except ValueError as error:
        raise ConfigError(str(error), stage="tls") from error
    return None if files is None else ChannelConfig(tls=Tls(files, PeerRole.OPERATOR))
