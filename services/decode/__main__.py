"""``python -m services.decode``: run a decode pod until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import sys

from pydantic import ValidationError

from services.decode.app import serve
from services.decode.settings import DecodeSettings
from services.environment import refuse_unknown
from services.pod import limit_torch_threads
from sluice.errors import SluiceError
from sluice.telemetry.logging import configure


def main() -> int:
    try:
        refuse_unknown(os.environ, "SLUICE_DECODE_", DecodeSettings.model_fields)
        settings = DecodeSettings()
        configure("decode", settings.log_level)
        limit_torch_threads(settings.device)
        asyncio.run(serve(settings))
    except (SluiceError, ValidationError) as error:
        print(f"decode: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
