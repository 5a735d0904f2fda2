"""``make test-clients``: other people's clients, each in an environment of its own, against a running stack.

The stack is prefill, decode and router as three processes, with API keys on. The model is the small one of this
repository with a chat template, so answers are gibberish: what is held to a grammar must still parse. Prints a table;
the exit code counts the clients that failed or could not be installed. Names as arguments run only those.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sluice.apikeys import ApiKey, digest_of, new_secret
from sluice.cli.stack import Stack, StackConfig, run_stack
from sluice.config import PoolMode

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "clients"
_TIMEOUT_S = 300.0
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Client:
    """``environment`` is shared by clients that install together; ``packages`` are pip's or npm's."""

    name: str
    script: str
    environment: str
    packages: tuple[str, ...]
    no_deps: tuple[str, ...] = ()  # installed alone: their dependencies are not needed for this


_FRAMEWORKS = ("langchain-openai", "litellm", "instructor")
# The newest majors need node 22, which npm has too.
_NODE = ("node@22", "openai@7", "ai@7", "@ai-sdk/openai-compatible@3", "@ai-sdk/openai@4", "zod@4")
_LM_EVAL = (
    "aiohttp", "datasets", "dill", "evaluate", "jinja2", "jsonlines", "more-itertools", "numpy",
    "pytablewriter", "requests", "rouge-score", "sacrebleu", "scikit-learn", "sqlitedict",
    "tenacity", "tokenizers", "tqdm", "transformers", "word2number", "zstandard",
)  # fmt: skip
CLIENTS = (
    Client("openai-python, current major", "openai_python.py", "openai-now", ("openai",)),
    Client("openai-python, the one before", "openai_python.py", "openai-before", ("openai<3",)),
    Client("langchain-openai", "langchain.py", "frameworks", _FRAMEWORKS),
    Client("litellm", "litellm_calls.py", "frameworks", _FRAMEWORKS),
    Client("instructor", "instructor_modes.py", "frameworks", _FRAMEWORKS),
    Client("lm-eval local-completions", "lm_eval_scores.py", "lm-eval", _LM_EVAL, ("lm-eval",)),
    Client("aiperf", "aiperf_profile.py", "aiperf", ("aiperf",)),
    Client("openai-node", "openai_node.mjs", "node", _NODE),
    Client("Vercel AI SDK", "vercel_ai.mjs", "node", _NODE),
)


@dataclass(frozen=True)
class Result:
    client: Client
    verdict: str
    detail: str


def main(names: list[str]) -> int:
    chosen = [c for c in CLIENTS if not names or any(name in c.name for name in names)]
    console = Console(width=140)
    with tempfile.TemporaryDirectory(prefix="sluice-clients-") as folder:
        results = asyncio.run(_run(chosen, Path(folder), console))
    table = Table("client", "verdict", "version: what was checked, or what went wrong")
    for result in results:
        table.add_row(result.client.name, result.verdict, escape(result.detail))
    console.print(table)
    return sum(result.verdict != "passed" for result in results)


async def _run(chosen: list[Client], folder: Path, console: Console) -> list[Result]:
    problems: dict[str, str] = {}
    for client in chosen:
        if client.environment not in problems:
            with console.status(f"installing {client.environment}"):
                problems[client.environment] = install(client)
    model = folder / "tiny"
    shutil.copytree(ROOT / "models" / "tiny-dsv4", model)
    (model / "chat_template.jinja").write_text(_TEMPLATE)
    secret = new_secret()
    keys = folder / "keys.txt"
    keys.write_text(ApiKey("clients", digest_of(secret)).line())
    os.environ["SLUICE_ROUTER_API_KEYS_FILE"] = str(keys)  # the stack's router reads it
    stack = Stack(StackConfig(model, PoolMode.PAGED, None, folder, ready_timeout_s=180.0))
    results: list[Result] = []
    with console.status("starting the stack") as status:
        async with run_stack(stack, _silent):
            await stack.wait_ready(_silent)
            for client in chosen:
                status.update(client.name)
                if problem := problems[client.environment]:
                    results.append(Result(client, "not installed", problem))
                else:
                    results.append(
                        await asyncio.to_thread(_check, client, stack.url, model, secret)
                    )
    return results


def install(client: Client) -> str:
    """Make the client's environment, once. Returns what went wrong."""
    home = BUILD / client.environment
    stamp = home / "installed"
    wanted = "\n".join((*client.packages, *client.no_deps))
    if stamp.is_file() and stamp.read_text() == wanted:
        return ""
    home.mkdir(parents=True, exist_ok=True)
    try:
        if client.environment == "node":
            (home / "package.json").write_text('{"private": true, "type": "module"}\n')
            _install(["npm", "install", "--no-fund", "--no-audit", *client.packages], home)
        else:
            if not (home / "bin" / "python").exists():  # from a try that broke off
                venv.create(home, with_pip=True, symlinks=True)
            pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q"]
            _install([*pip, *client.packages], home)
            if client.no_deps:
                _install([*pip, "--no-deps", *client.no_deps], home)
    except subprocess.CalledProcessError as error:
        return _last_line(error.stderr)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    stamp.write_text(wanted)
    return ""


def _install(command: list[str], home: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(
        command, cwd=home, check=True, timeout=1800, env=environment, capture_output=True, text=True
    )


def _check(client: Client, url: str, model: Path, secret: str) -> Result:
    home = BUILD / client.environment
    script = Path(__file__).parent / client.script
    if script.suffix == ".mjs":  # node finds packages beside the script only
        script = Path(shutil.copy(script, home))
        command = [str(home / "node_modules" / ".bin" / "node"), str(script)]
    else:
        command = [str(home / "bin" / "python"), str(script)]
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    environment = kept | {
        "SLUICE_URL": url,
        "SLUICE_MODEL": model.name,
        "SLUICE_TOKENIZER": str(model),
        "OPENAI_API_KEY": secret,
        "NO_PROXY": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the internet for prices
        "PATH": f"{home / 'bin'}:{home / 'node_modules/.bin'}:{os.environ['PATH']}",
    }
    try:
        done = subprocess.run(
            command, env=environment, cwd=home, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Result(client, "failed", f"not over within {_TIMEOUT_S:.0f} s")
    log = BUILD / f"{client.name.replace(',', '').replace(' ', '-')}.log"
    log.write_text(done.stdout + done.stderr)
    if done.returncode == 0:
        return Result(client, "passed", _last_line(done.stdout))
    last = _last_line(done.stderr or done.stdout)
    return Result(client, "failed", f"{last[:300]} (all of it: {log.relative_to(ROOT)})")


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "said nothing")


def _silent(role: str, doing: str) -> None:
    """Nobody watches the start."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
