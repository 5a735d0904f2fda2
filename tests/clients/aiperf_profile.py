"""aiperf: a short profile of streamed chats; it warns when usage differs from its own token counts."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

done = subprocess.run(
    [
        "aiperf", "profile", "--model", os.environ["SLUICE_MODEL"], "--url", os.environ["SLUICE_URL"],
        "--endpoint-type", "chat", "--streaming", "--tokenizer", os.environ["SLUICE_TOKENIZER"],
        "--request-count", "12", "--concurrency", "3", "--isl", "32", "--osl", "16",
        "--extra-inputs", "ignore_eos:true", "--ui", "none",
    ],
    capture_output=True,
    text=True,
    timeout=240,
)  # fmt: skip
output = done.stdout + done.stderr
if done.returncode:
    sys.exit(output[-1500:])
warnings = [
    line for line in output.splitlines() if "usage" in line.lower() and "warn" in line.lower()
]
if warnings:
    sys.exit("\n".join(warnings))
print(f"{version('aiperf')}: 12 streamed chats, no usage warning")
