"""``sluice explain``: published models' byte figures, what people read, JSON, and what is refused.

To write the golden file anew after a wanted change: ``UPDATE_GOLDEN=1 pytest
tests/unit/cli/test_explain.py``.
"""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest

from sluice.cli.__main__ import main
from sluice.cli.explain import Inventory, explain_inventory, read_inventory
from sluice.config import PoolConfig, PoolMode
from sluice.layout.component import Component, Coverage
from sluice.layout.explain import bytes_per_token, most_request_bytes, moved_by
from sluice.models.inventory import INVENTORIES
from sluice.models.registry import LOADERS, load_model
from sluice.pools.specs import components_of

TESTS = Path(__file__).parents[2]
FLASH, PRO = (TESTS / "data" / "configs" / f"deepseek-v4-{size}.json" for size in ("flash", "pro"))
KIMI = TESTS / "data" / "configs" / "kimi-linear-48b-a3b.json"
TINY = TESTS.parent / "models" / "tiny-dsv4"
GOLDEN = Path(__file__).parent / "golden" / "explain_deepseek_v4_flash.txt"
MIB = 1 << 20
KIB = 1 << 10
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
}


# A draft of the tests' Llama: two layers with one key/value head of 32.
DSPARK = {
    **LLAMA,
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "block_size": 5,
    "num_target_layers": 30,
    "mask_token_id": 4,
    "markov_rank": 8,
}


def written(tmp_path: Path, config: object, name: str = "config.json") -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(config))
    return path


def named(inventory: Inventory, name: str) -> Component:
    return next(c for c in inventory.components if c.name == name)


def total_bytes(inventory: Inventory, tokens: int) -> int:
    return sum(moved_by(component, tokens).num_bytes for component in inventory.components)


# MiB a component, in the order of the components, for bfloat16 with float32 tails: DeepSeek-V4's published
# dimensions. Columns: c4, c4_indexer, c128, window, c4_tail, c4_indexer_tail, c128_tail, draft window,
# draft hidden; then the total.
MOVED = [
    (FLASH, 1024, (5.25, 1.31, 0.16, 5.38, 0.66, 0.16, 0, 0.125, 0.03), 13.1),
    (FLASH, 8192, (42.0, 10.5, 1.25, 5.38, 0.66, 0.16, 0, 0.125, 0.03), 60.1),
    (FLASH, 131072, (672, 168, 20.0, 5.38, 0.66, 0.16, 0, 0.125, 0.03), 866),
    (FLASH, 1000, (5.13, 1.28, 0.14, 5.38, 0.66, 0.16, 8.1, 0.125, 0.03), 21.0),
    (PRO, 1024, (7.50, 1.88, 0.24, 7.62, 0.94, 0.23, 0, 0.125, 0.05), 18.6),
    (PRO, 8192, (60.0, 15.0, 1.94, 7.62, 0.94, 0.23, 0, 0.125, 0.05), 85.9),
    (PRO, 131072, (960, 240, 31.0, 7.62, 0.94, 0.23, 0, 0.125, 0.05), 1240),
    (PRO, 1000, (7.32, 1.83, 0.21, 7.62, 0.94, 0.23, 12.6, 0.125, 0.05), 30.9),
]


@pytest.mark.parametrize("mode", PoolMode)
@pytest.mark.parametrize(("path", "tokens", "parts_mib", "total_mib"), MOVED)
def test_deepseek_v4_moves_what_its_published_dimensions_say(
    mode: PoolMode, path: Path, tokens: int, parts_mib: tuple[float, ...], total_mib: float
) -> None:
    inventory = read_inventory(path, mode=mode)
    for component, mib in zip(inventory.components, parts_mib, strict=True):
        found = moved_by(component, tokens).num_bytes / MIB
        assert found == pytest.approx(mib, rel=0.004, abs=0.006), component.name
    assert total_bytes(inventory, tokens) / MIB == pytest.approx(total_mib, rel=0.003)


@pytest.mark.parametrize(
    ("path", "parts"),
    [(FLASH, (5376, 1344, 160)), (PRO, (7680, 1920, 248))],
)
def test_deepseek_v4_keeps_the_published_bytes_a_token(path: Path, parts: tuple[int, ...]) -> None:
    components = read_inventory(path).components
    assert tuple(bytes_per_token(c) for c in components[:3]) == parts
    assert all(bytes_per_token(c) == 0 for c in components[3:])


@pytest.mark.parametrize(
    ("path", "num_layers", "layer_counts"), [(FLASH, 43, (21, 20)), (PRO, 61, (30, 31))]
)
def test_deepseek_v4_layers_are_of_the_published_kinds(
    path: Path, num_layers: int, layer_counts: tuple[int, int]
) -> None:
    inventory = read_inventory(path)
    assert inventory.num_layers == num_layers
    assert inventory.max_model_tokens == 1 << 20
    found = tuple(len(named(inventory, name).entries) for name in ("target.c4", "target.c128"))
    assert found == layer_counts
    assert [e.layer_id for e in named(inventory, "draft.swa").entries] == [num_layers]


def test_kimi_linear_keeps_the_published_bytes_a_token_and_a_request() -> None:
    inventory = read_inventory(KIMI)
    latents, conv, recurrent, length = inventory.components
    assert [c.name for c in inventory.components] == [
        "target.mla",
        "kda.conv",
        "kda.recurrent",
        "kda.length",
    ]
    assert bytes_per_token(latents) == 7 * 1152 == 8064
    assert {entry.row_bytes for entry in latents.entries} == {1152}
    assert {entry.row_bytes for entry in conv.entries} == {72 * KIB}
    assert {entry.row_bytes for entry in recurrent.entries} == {2 * MIB}
    assert most_request_bytes(conv) / MIB == pytest.approx(1.41, abs=0.005)
    assert most_request_bytes(recurrent) == 40 * MIB
    state = most_request_bytes(conv) + most_request_bytes(recurrent)
    assert state / MIB == pytest.approx(41.4, abs=0.05)
    assert state / bytes_per_token(latents) == pytest.approx(5380, abs=10)  # tokens of latents
    assert most_request_bytes(length) == 8


def test_kimi_linear_layers_are_the_published_ones() -> None:
    inventory = read_inventory(KIMI)
    assert (inventory.num_layers, inventory.max_model_tokens) == (27, 1 << 20)
    attention = [entry.layer_id for entry in named(inventory, "target.mla").entries]
    assert attention == [3, 7, 11, 15, 19, 23, 26]
    for name in ("kda.conv", "kda.recurrent"):
        layers = [entry.layer_id for entry in named(inventory, name).entries]
        assert layers == [layer for layer in range(27) if layer not in attention]


@pytest.mark.parametrize("tokens", [1, 1024, 131072])
def test_a_recurrent_state_moves_whole_whatever_the_prompt(tokens: int) -> None:
    inventory = read_inventory(KIMI)
    slots = 20 * (72 * KIB + 2 * MIB) + 8
    assert total_bytes(inventory, tokens) == tokens * 8064 + slots


def test_llama_keeps_keys_and_values_of_every_token(tmp_path: Path) -> None:
    inventory = read_inventory(written(tmp_path, LLAMA), lengths=[7, 1000])
    (kv,) = inventory.components
    assert bytes_per_token(kv) == 30 * 3 * 2 * 64 * 2
    assert (total_bytes(inventory, 7), most_request_bytes(kv)) == (7 * 23040, 0)
    text = explain_inventory(inventory)
    assert "a request keeps 23,040 bytes a token, and nothing besides" in text
    assert "draft  none" in text


def test_qwen3_heads_are_as_wide_as_its_config_says(tmp_path: Path) -> None:
    config = {
        **LLAMA,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 28,
        "head_dim": 128,
    }
    (kv,) = read_inventory(written(tmp_path, config)).components
    assert bytes_per_token(kv) == 28 * 8 * 2 * 128 * 2


@pytest.mark.parametrize("mode", PoolMode)
@pytest.mark.parametrize("steps", [0, 3])
def test_it_is_what_a_pod_of_the_loaded_model_declares(mode: PoolMode, steps: int) -> None:
    loaded = load_model(TINY, draft=steps > 0)
    needs = loaded.target.state_needs("float16")
    if loaded.draft is not None:
        needs += loaded.draft.state_needs("float16")
    declared = components_of(needs, PoolConfig(mode=mode), steps + 1)
    inventory = read_inventory(
        TINY / "config.json", mode=mode, spec_steps=steps, kv_dtype="float16"
    )
    assert inventory.components == declared
    assert inventory.num_layers == len(loaded.target.info.ratios)
    assert inventory.max_model_tokens == loaded.target.info.max_model_tokens


def test_a_nextn_draft_is_there_when_the_config_counts_one(tmp_path: Path) -> None:
    config = {**json.loads(FLASH.read_text()), "num_nextn_predict_layers": 0}
    inventory = read_inventory(written(tmp_path, config))
    assert "draft  none" in explain_inventory(inventory)
    assert inventory.components == read_inventory(FLASH).components[:-2]


def test_a_dspark_draft_keeps_keys_and_values_of_every_token(tmp_path: Path) -> None:
    target, draft = written(tmp_path, LLAMA), written(tmp_path, DSPARK, "draft.json")
    inventory = read_inventory(target, draft=draft)
    kv, draft_kv = inventory.components
    assert (bytes_per_token(kv), bytes_per_token(draft_kv)) == (23040, 2 * 2 * 32 * 2)
    assert [entry.layer_id for entry in draft_kv.entries] == [30, 31]
    assert "draft  5 steps, 6 tokens verified a step" in explain_inventory(inventory)
    assert read_inventory(target, draft=draft, spec_steps=5) == inventory
    assert read_inventory(target, draft=draft, spec_steps=0).components == (kv,)


def test_a_draft_that_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = str(written(tmp_path, LLAMA)), written(tmp_path, DSPARK, "draft.json")
    other = written(tmp_path, {**DSPARK, "num_target_layers": 29}, "other.json")
    for words, said in (
        ([target, "--draft", str(draft), "--spec-steps", "3"], "block_size is 5"),
        ([target, "--draft", str(other)], "num_target_layers is 29, its target has 30"),
        ([target, "--draft", target], "LlamaForCausalLM"),
        (["tiny-dsv4", "--draft", str(draft)], "a draft layer of its own"),
    ):
        assert main(["explain", *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["explain", target, "--draft", str(draft)]) == 0
    assert "draft.kv" in capsys.readouterr().out


def test_every_architecture_that_loads_has_an_inventory() -> None:
    assert set(LOADERS) == set(INVENTORIES)


def test_rings_follow_the_speculation_steps() -> None:
    rows = [
        named(read_inventory(FLASH, mode=PoolMode.UNIFIED, spec_steps=steps), "target.swa_ring")
        for steps in (0, 5)
    ]
    assert [component.rows_per_item for component in rows] == [128, 133]


def test_the_number_type_is_the_configs_unless_chosen(tmp_path: Path) -> None:
    assert read_inventory(FLASH).pool.kv_dtype == "bfloat16"
    assert "bfloat16 as in config.json" in explain_inventory(read_inventory(FLASH))
    chosen = read_inventory(FLASH, kv_dtype="float32")
    assert bytes_per_token(named(chosen, "target.c4")) == 2 * 5376
    assert "as in config.json" not in explain_inventory(chosen)
    newer = {**LLAMA, "torch_dtype": None, "dtype": "float16"}
    assert read_inventory(written(tmp_path, newer)).pool.kv_dtype == "float16"
    silent = {**LLAMA, "torch_dtype": None}
    assert read_inventory(written(tmp_path, silent)).pool.kv_dtype == PoolConfig().kv_dtype


def test_an_inventory_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(FLASH)]) == 0
    text = capsys.readouterr().out
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_the_documented_output_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    document = (TESTS.parent / "docs" / "state-layouts.md").read_text()
    assert main(["explain", str(KIMI), "--tokens", "1024", "131072"]) == 0
    assert textwrap.indent(capsys.readouterr().out, "    ") in document


def test_lengths_go_up_to_what_the_model_takes(tmp_path: Path) -> None:
    assert read_inventory(FLASH).lengths == (1024, 8192, 131072)
    assert read_inventory(written(tmp_path, LLAMA)).lengths == (1024,)
    short = {**LLAMA, "max_position_embeddings": 300}
    assert read_inventory(written(tmp_path, short)).lengths == (300,)


def test_a_model_is_found_by_file_folder_or_name(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for model in (str(TINY / "config.json"), str(TINY), "tiny-dsv4"):
        assert main(["explain", model, "--tokens", "100", "2000"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    assert "  100 tokens  2000 tokens\n" in shown[0]


def test_without_steps_there_is_no_draft_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tiny-dsv4", "--spec-steps", "0", "--mode", "unified"]) == 0
    text = capsys.readouterr().out
    assert "draft  none" in text
    assert "draft." not in text
    assert "state  unified" in text
    assert "target.swa_ring" in text


def test_json_holds_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(FLASH), "--tokens", "1000", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    inventory = read_inventory(FLASH)
    assert shown["architecture"] == "DeepseekV4ForCausalLM"
    assert (shown["pool_mode"], shown["kv_dtype"], shown["spec_steps"]) == ("paged", "bfloat16", 3)
    assert shown["bytes_per_token"] == 6880
    tail = next(c for c in shown["components"] if c["name"] == "target.c128_tail")
    assert (tail["owner"], tail["coverage"]) == ("target", Coverage.OPEN_BLOCK.value)
    assert tail["most_request_bytes"] == 20 * 127 * 4 * KIB
    assert tail["layers"][0] == {
        "layer": 3,
        "dtype": "float32",
        "row_shape": [1024],
        "row_bytes": 4096,
    }
    (prompt,) = shown["prompts"]
    assert prompt["tokens"] == 1000
    assert prompt["bytes"] == total_bytes(inventory, 1000)
    assert prompt["components"][6] == {
        "name": "target.c128_tail",
        "rows": 1000 % 128,
        "bytes": 20 * (1000 % 128) * 4 * KIB,
    }


def test_json_of_a_model_without_a_draft_has_no_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(written(tmp_path, LLAMA)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spec_steps"] == 0


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported"),
        ({**LLAMA, "architectures": ["A", "B"]}, "'architectures' is ['A', 'B']"),
        ({"vocab_size": 3}, "'architectures' is missing"),
        ([1, 2], "holds a list, not an object"),
        ({**LLAMA, "num_hidden_layers": "30"}, "'num_hidden_layers' is '30'"),
        ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn' is not supported"),
    ],
)
def test_a_config_that_says_something_else_is_refused(
    config: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(written(tmp_path, config))]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-model"], "no-such-model"),
        ([__file__], "can't read"),
        (["tiny-dsv4", "--tokens", "8193"], "longer than the model's 8192"),
        (["tiny-dsv4", "--spec-steps", "-1"], "--spec-steps is -1"),
        (["tiny-dsv4", "--kv-dtype", "int3"], "kv_dtype 'int3'"),
    ],
)
def test_what_cannot_be_explained_is_one_line_and_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


@pytest.mark.parametrize("tokens", ["0", "-5", "many"])
def test_a_prompt_has_at_least_one_token(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["explain", "tiny-dsv4", "--tokens", tokens])
    assert caught.value.code == 2
    assert "argument --tokens" in capsys.readouterr().err
