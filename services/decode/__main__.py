"""``python -m services.decode``: run a decode pod until told to stop, or with ``--layout`` say what it would be."""

from __future__ import annotations

import asyncio
import os
import sys

from pydantic import ValidationError

from services.declared import declared_layout
from services.decode.app import serve
from services.decode.settings import DecodeSettings
from services.environment import refuse_unknown
from services.pod import limit_torch_threads
from sluice.errors import SluiceError
from sluice.layout.encoding import encode
from sluice.telemetry.logging import configure
from sluice.types import Role


def main() -> int:
    try:
        refuse_unknown(os.environ, "SLUICE_DECODE_", DecodeSettings.model_fields)
        settings = DecodeSettings()
        if sys.argv[1:] == ["--layout"]:
            print(encode(declared_layout(settings, Role.DECODE)))
            return 0
        configure("decode", settings.log_level)
        limit_torch_threads(settings.device)
        asyncio.run(serve(settings))
    except (SluiceError, ValidationError) as error:
        print(f"decode: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
