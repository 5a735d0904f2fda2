"""lm-eval's local-completions: its own command over three tasks, and scores held against what decode wrote.

A scored request is token ids with echo, logprobs and max_tokens 1, in batches. Only prefill ever sees those tokens, so
its scores of an answer must be those that decode gave while it wrote it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import requests
from lm_eval.models.openai_completions import LocalCompletionsAPI

URL, MODEL = os.environ["SLUICE_URL"] + "/v1/completions", os.environ["SLUICE_MODEL"]
ARGUMENTS = {
    "model": MODEL,
    "base_url": URL,
    "tokenizer": os.environ["SLUICE_TOKENIZER"],
    "tokenizer_backend": "huggingface",
    "max_length": 512,
}
CLOZE = (  # the model knows its Bible
    ("And God", ["said", "xqzt"]),
    ("In the beginning God created the heaven and the", ["earth", "email"]),
    ("The children of", ["Israel", "zyxw"]),
    ("And it came to", ["pass", "kkkk"]),
)
PROSE = ("It is a truth universally acknowledged. " * 8, "And the LORD spake unto Moses. " * 120)
TASKS = {
    "cloze": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "choices",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "prose": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
    "writing": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "",
        "generation_kwargs": {"until": ["\n\n", "."], "max_gen_toks": 16, "temperature": 0},
        "metric_list": [{"metric": "bypass"}],
    },
}


def evaluate(folder: Path) -> dict[str, Any]:
    """Run the command over the tasks; their results."""
    docs = {
        "cloze": [{"text": text, "choices": choices} for text, choices in CLOZE],
        "prose": [{"text": text} for text in PROSE],
        "writing": [{"text": text} for text, _ in CLOZE],
    }
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(json.dumps(doc) for doc in docs[name]))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        # JSON is YAML.
        whole = {"task": name, "test_split": "test", **source, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))
    arguments = ",".join(f"{name}={value}" for name, value in ARGUMENTS.items())
    command = [
        "lm_eval", "run", "--model", "local-completions", "--batch_size", "4",
        "--model_args", f"{arguments},num_concurrent=2", "--tasks", ",".join(TASKS),
        "--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples",
    ]  # fmt: skip
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=offline)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    (results,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob("samples_writing_*.jsonl")
    assert len(samples.read_text().splitlines()) == len(CLOZE)
    return json.loads(results.read_text())["results"]


def scores_of_written() -> int:
    """How many tokens were compared."""
    model = LocalCompletionsAPI(**ARGUMENTS, pretrained=MODEL, batch_size=4)
    prompts = [model.tok_encode(text) for text, _ in CLOZE]
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 0, "logprobs": 0}
    answer = requests.post(
        URL, json={**body, "return_token_ids": True}, headers=model.header, timeout=60
    )
    answer.raise_for_status()
    written = answer.json()["choices"]
    scored = model._loglikelihood_tokens(
        [
            (("", ""), prompt, choice["token_ids"])
            for prompt, choice in zip(prompts, written, strict=True)
        ],
        disable_tqdm=True,
    )
    for (total, greedy), choice in zip(scored, written, strict=True):
        assert greedy, "prefill would have chosen otherwise"
        expected = sum(choice["logprobs"]["token_logprobs"])
        assert math.isclose(total, expected, abs_tol=1e-2), (total, expected)
    return sum(len(choice["token_ids"]) for choice in written)


compared = scores_of_written()
with tempfile.TemporaryDirectory() as name:
    results = evaluate(Path(name))
assert results["cloze"]["acc,none"] == 1.0, results["cloze"]
# 1.71 on held-out text (models/tiny-dsv4/README.md); this text repeats itself.
bits = results["prose"]["bits_per_byte,none"]
assert 0 < bits < 2, bits
print(
    f"{version('lm-eval')}: lm_eval run over multiple choice (all right), rolling perplexity "
    f"({bits:.2f} bits a byte) and generation; {compared} tokens scored as decode wrote them"
)
