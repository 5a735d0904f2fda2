"""One request's state in DeepSeek-V4-Flash's published shape: sizes by component, and a real memory that holds it.

``python -m bench.transfer_state MODE LENGTH`` is the decode side: it prints endpoint and grant as one JSON line, and
its digests for every line on stdin.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import torch

from sluice.config import PoolConfig, PoolMode
from sluice.layout.component import Component
from sluice.layout.span import Run, count_rows, span
from sluice.models.config_fields import ConfigFields
from sluice.models.deepseek_v4.config import DeepseekV4Config, parse_config
from sluice.models.deepseek_v4.state import draft_state, target_state
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory, build_memory
from sluice.transfer.digest import digest_rows
from sluice.transfer.nixl import NixlPlane
from sluice.transfer.plane import Endpoint
from sluice.types import RequestId
from tests.contract.target_process import endpoint_to_json

VERIFY_TOKENS = 4
PAGE_TOKENS = 128


def flash_config() -> DeepseekV4Config:
    """The published DeepSeek-V4-Flash ``config.json`` values that shape state (43 layers, 21 CSA, 20 HCA)."""
    return parse_config(
        ConfigFields(
            {
                "num_hidden_layers": 43,
                "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
                "num_nextn_predict_layers": 1,
                "vocab_size": 129280,
                "hidden_size": 4096,
                "head_dim": 512,
                "qk_rope_head_dim": 64,
                "num_attention_heads": 64,
                "q_lora_rank": 1024,
                "o_groups": 8,
                "o_lora_rank": 1024,
                "sliding_window": 128,
                "index_n_heads": 64,
                "index_head_dim": 128,
                "index_topk": 512,
                "n_routed_experts": 256,
                "moe_intermediate_size": 2048,
                "num_experts_per_tok": 6,
                "num_hash_layers": 3,
                "routed_scaling_factor": 1.5,
                "swiglu_limit": 10.0,
                "bos_token_id": 0,
                "eos_token_id": 1,
            }
        )
    )


def open_request(mode: str, length: int) -> tuple[Memory, RequestTables]:
    """A memory that holds two requests, grown in turns so that their pages interleave, and one of them."""
    config = flash_config()
    needs = (*target_state(config, "bfloat16"), *draft_state(config, "bfloat16"))
    pages = -(-length // PAGE_TOKENS) + 1
    memory = build_memory(
        needs,
        PoolConfig(
            mode=PoolMode(mode),
            page_tokens=PAGE_TOKENS,
            num_pages=2 * pages,
            num_window_pages=2 * pages,
            num_slots=2,
            kv_dtype="bfloat16",
        ),
        VERIFY_TOKENS,
    )
    ours, other = (memory.open(RequestId(name), length) for name in ("ours", "other"))
    for stop in range(PAGE_TOKENS, length + PAGE_TOKENS, PAGE_TOKENS):
        for tables in (ours, other):
            memory.extend(tables, min(stop, length))
            memory.advance(tables, min(stop, length))
    return memory, ours


def scramble(memory: Memory) -> None:
    """Random bytes everywhere, so that a digest means something."""
    memory.arena().view(torch.int64).random_()


def spans(memory: Memory, tables: RequestTables, length: int) -> dict[str, tuple[Run, ...]]:
    return {c.name: span(c, tables, length) for c in memory.components()}


def digests(memory: Memory, tables: RequestTables, length: int) -> dict[str, str]:
    found = spans(memory, tables, length)
    return {c.name: digest_rows(memory, c, found[c.name]).hex() for c in memory.components()}


def describe_request(memory: Memory, tables: RequestTables, length: int, endpoint: Endpoint) -> str:
    runs = {
        name: [asdict(run) for run in found]
        for name, found in spans(memory, tables, length).items()
    }
    return json.dumps({"endpoint": endpoint_to_json(endpoint), "runs": runs})


@dataclass(frozen=True)
class ComponentSize:
    """What of one component a prompt moves."""

    component: str
    rows: int
    entries: int
    num_bytes: int


def size_of(component: Component, runs: tuple[Run, ...]) -> ComponentSize:
    rows = count_rows(runs)
    return ComponentSize(
        component.name, rows, len(component.entries), rows * component.bytes_per_row
    )


def serve(mode: str, length: int) -> None:
    torch.set_num_threads(1)
    memory, tables = open_request(mode, length)
    plane = NixlPlane(f"bench-decode-{mode}-{length}", initiator=False)
    endpoint = plane.open(memory.arena(), memory.regions())
    print(describe_request(memory, tables, length, endpoint), flush=True)
    for _line in sys.stdin:
        print(json.dumps(digests(memory, tables, length)), flush=True)
    plane.close()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
