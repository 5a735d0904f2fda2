"""lm-eval's local-completions: token-id prompts, echo, logprobs, max_tokens 1, batches; and free generation."""

from __future__ import annotations

import os
from importlib.metadata import version

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

model = LocalCompletionsAPI(
    base_url=os.environ["SLUICE_URL"] + "/v1/completions",
    pretrained=os.environ["SLUICE_MODEL"],
    model=os.environ["SLUICE_MODEL"],
    tokenizer=os.environ["SLUICE_TOKENIZER"],
    tokenizer_backend="huggingface",
    batch_size=4,
    max_length=512,
)


def instances(kind: str, requests: list[tuple[object, ...]]) -> list[Instance]:
    return [Instance(kind, {}, arguments, rank) for rank, arguments in enumerate(requests)]


pairs = [("The king", " said"), ("The king", " q z x"), ("def f(", "x):"), ("a b c", " d")]
scores = model.loglikelihood(instances("loglikelihood", [*pairs]), disable_tqdm=True)
assert len(scores) == len(pairs)
assert all(score < 0 and isinstance(greedy, bool) for score, greedy in scores)
assert scores[0][0] > scores[1][0], "real words are likelier than letters"
options = {"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0}
texts = model.generate_until(
    instances("generate_until", [("The king", options), ("a", options)]), disable_tqdm=True
)
assert len(texts) == 2
print(f"{version('lm-eval')}: loglikelihood of {len(pairs)} pairs in batches, generate_until")
