"""``python -m services.prefill``: run a prefill pod until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import sys

from pydantic import ValidationError

from services.environment import refuse_unknown
from services.pod import limit_torch_threads
from services.prefill.app import serve
from services.prefill.settings import PrefillSettings
from sluice.errors import SluiceError
from sluice.telemetry.logging import configure


def main() -> int:
    try:
        refuse_unknown(os.environ, "SLUICE_PREFILL_", PrefillSettings.model_fields)
        settings = PrefillSettings()
        configure("prefill", settings.log_level)
        limit_torch_threads(settings.device)
        asyncio.run(serve(settings))
    except (SluiceError, ValidationError) as error:
        print(f"prefill: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
