"""aiperf: profiles of streamed chats and completions; it warns when usage differs from its own token counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

# So long that the template's few tokens, which aiperf doesn't count, stay within the tenth that it lets pass.
PROMPT, OUTPUT, REQUESTS = 400, 16, 12
RUNS: dict[str, tuple[str, ...]] = {
    "counted by aiperf": ("--endpoint-type", "chat"),
    "usage in every chunk": (
        "--endpoint-type", "chat", "--use-server-token-count", "--per-chunk-usage",
    ),
    "completions": ("--endpoint-type", "completions", "--use-server-token-count"),
}  # fmt: skip


def profile(options: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """What aiperf measured. Ends the process with its output when it warned."""
    command = [
        "aiperf", "profile", "--model", os.environ["SLUICE_MODEL"], "--url", os.environ["SLUICE_URL"],
        "--api-key", os.environ["OPENAI_API_KEY"], "--streaming",
        "--tokenizer", os.environ["SLUICE_TOKENIZER"], "--isl", str(PROMPT), "--osl", str(OUTPUT),
        "--request-count", str(REQUESTS), "--concurrency", "3", "--ui", "none",
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
        "--artifact-dir", str(folder), *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    output = done.stdout + done.stderr
    # Its own words: "Usage discrepancy", "OSL mismatch", and whatever it logs about usage.
    doubts = [
        line
        for line in output.splitlines()
        if "discrepan" in line.lower()
        or "mismatch" in line.lower()
        or ("usage" in line.lower() and "warn" in line.lower())
    ]
    if done.returncode or doubts:
        sys.exit("\n".join(doubts) or output[-1500:])
    return json.loads((folder / "profile_export_aiperf.json").read_text())


with tempfile.TemporaryDirectory() as name:
    for run, options in RUNS.items():
        measured = profile(options, Path(name) / run.replace(" ", "-"))
        assert measured["request_count"]["avg"] == REQUESTS, (run, measured["request_count"])
        assert not measured.get("error_request_count"), (run, measured["error_request_count"])
        # What aiperf counts is the text, which may have one token less than was written.
        assert abs(measured["output_sequence_length"]["avg"] - OUTPUT) < 1, (run, measured)
        assert measured["time_to_first_token"]["avg"] > 0
        assert measured["inter_token_latency"]["avg"] > 0
print(
    f"{version('aiperf')}: streamed chats and completions, {REQUESTS} of {OUTPUT} tokens each, usage as it "
    "counts itself and in every chunk: no warning"
)
