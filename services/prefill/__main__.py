"""``python -m services.prefill``: run a prefill pod until told to stop, or with ``--layout`` say what it would be."""

from __future__ import annotations

import asyncio
import os
import sys

from pydantic import ValidationError

from services.declared import declared_layout
from services.environment import refuse_unknown
from services.pod import limit_torch_threads
from services.prefill.app import serve
from services.prefill.settings import PrefillSettings
from sluice.errors import SluiceError
from sluice.layout.encoding import encode
from sluice.telemetry.logging import configure
from sluice.types import Role


def main() -> int:
    try:
        refuse_unknown(os.environ, "SLUICE_PREFILL_", PrefillSettings.model_fields)
        settings = PrefillSettings()
        if sys.argv[1:] == ["--layout"]:
            print(encode(declared_layout(settings, Role.PREFILL)))
            return 0
        configure("prefill", settings.log_level)
        limit_torch_threads(settings.device)
        asyncio.run(serve(settings))
    except (SluiceError, ValidationError) as error:
        print(f"prefill: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
