"""`bsl mcp`, asked by the official client: every tool on real runs, acts in two steps, and logs that never act."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters

from bigsci_launch.agents.fit import MOST_TOKENS, count_tokens
from bigsci_launch.runs.attempts import query_attempt
from bigsci_launch.runs.control.requests import read_waiting
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.ledger import read_acts
from bigsci_launch.scheduler.job import JobState
from tests.support.waiting import wait_until
from tests.unit.agents.test_fit import hostile_text, parts_of

ROOT = Path(__file__).parents[2]
BSL = Path(sys.executable).with_name("bsl")
READ = {"list", "status", "why", "spy", "slow", "logs", "diff", "plan", "nodes", "requests", "more"}
ACT = {"control", "cancel", "confirm"}
TOKEN = re.compile(r"confirm\(token='([^']+)'\)")
SAYS = """import sys, time
sys.stdout.reconfigure(encoding="utf-8", newline="")
print(open(sys.argv[1], newline="", encoding="utf-8").read())
print("ready", flush=True)
time.sleep(600)"""
ME = pwd.getpwuid(os.getuid()).pw_name

Ask = Callable[..., Awaitable[str]]


def talk(runs: Path, conversation: Callable[[Ask], Awaitable[Any]], *options: str) -> Any:
    """Hold a conversation with a server of its own; `ask` returns the text of an answer, which always fits."""

    async def main() -> Any:
        environment = {**os.environ, "BSL_RUNS": str(runs)}
        server = StdioServerParameters(command=str(BSL), args=["mcp", *options], cwd=ROOT, env=environment)
        async with Client(server) as client:

            async def ask(tool: str, **arguments: Any) -> str:
                done = await client.call_tool(tool, arguments)
                (content,) = done.content
                assert not done.is_error and count_tokens(content.text) <= MOST_TOKENS  # type: ignore[union-attr]
                return str(content.text)  # type: ignore[union-attr]

            ask.client = client  # type: ignore[attr-defined]
            return await conversation(ask)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `ended` has failed; `broken` has printed fifty hostile texts."""
    folder = tmp_path_factory.mktemp("agents") / "runs"
    submit(folder, "ended", "sh", "-c", "echo CUDA error: out of memory; exit 1", check=False)
    return folder


@pytest.fixture
def living(runs: Path, tmp_path: Path) -> Iterator[RunDir]:
    """A run whose two ranks have printed fifty hostile texts, and wait."""
    run, log = RunDir(runs / tmp_path.name), tmp_path / "said.txt"
    log.write_text("\n".join(map(hostile_text, range(50))), newline="", encoding="utf-8")
    submit(runs, run.name, sys.executable, "-c", SAYS, str(log), "--detach")
    wait_until(lambda: "ready" in bsl(runs, "logs", run.name, "--grep", "ready"))
    yield run
    bsl(runs, "cancel", run.name)


def submit(runs: Path, name: str, *command: str, check: bool = True) -> None:
    detach = [word for word in command if word == "--detach"]
    program = json.dumps([word for word in command if word != "--detach"])
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 2}
    keys = {
        "run.name": name,
        "run.root": runs,
        "run.command": program,
        **{f"parallelism.{key}": size for key, size in sizes.items()},
    }
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    bsl(runs, "submit", "configs/demo.yaml", "--local", *words, *detach, check=check)


def bsl(runs: Path, *words: str, check: bool = False) -> str:
    environment = {**os.environ, "BSL_RUNS": str(runs)}
    done = subprocess.run(
        [BSL, *words], cwd=ROOT, env=environment, check=check, capture_output=True, text=True, timeout=300
    )
    return done.stdout


def plain(line: str) -> str:
    """Return a line without what time changes: ages, and the width of columns that have them."""
    return re.sub(r"\d[\d.]* (?:(?:h \d+ )?min(?: \d+ s)?|s)\b", "AGE", " ".join(line.split()))


def test_every_tool_gives_the_answer_of_its_command(runs: Path) -> None:
    recording = "diagnostics/signatures/stale-build-lock/recording"
    asked: dict[str, tuple[dict[str, Any], list[str]]] = {
        "list": ({"state": "FAILED"}, ["list", "--state", "FAILED"]),
        "status": ({"run": "ended"}, ["status", "ended"]),
        "why": ({"what": "ended"}, ["why", "ended"]),
        "spy": ({"bundle": recording}, ["spy", "--bundle", recording]),
        "slow": ({"run": "ended"}, ["slow", "ended"]),
        "logs": ({"run": "ended", "ranks": "0", "grep": "CUDA"}, ["logs", "ended", "--rank", "0", "--grep", "CUDA"]),
        "diff": ({"a": "README.md", "b": "LICENSE"}, ["diff-weights", "README.md", "LICENSE"]),
        "plan": (
            {"config": "configs/bloom-176b.yaml", "top": 1, "set": ["slurm.nodes=48"]},
            ["plan", "configs/bloom-176b.yaml", "--top", "1", "--set", "slurm.nodes=48"],
        ),
        "nodes": ({}, ["nodes"]),
        "requests": ({"run": "ended"}, ["control", "ended"]),
    }

    async def conversation(ask: Any) -> dict[str, str]:
        tools = (await ask.client.list_tools()).tools
        assert {tool.name for tool in tools} == READ == {*asked, "more"}
        assert all(tool.annotations.read_only_hint for tool in tools)
        return {tool: await ask(tool, **arguments) for tool, (arguments, _) in asked.items()}

    for tool, shown in talk(runs, conversation).items():
        _, data, _ = parts_of(shown)
        lines = [plain(line) for line in bsl(runs, *asked[tool][1]).splitlines() if line.strip(" ─")]
        answered = {plain(line) for line in data}
        assert len([line for line in lines[:10] if line in answered]) >= min(len(lines), 10) - 1, (tool, shown)


def test_no_argument_passes_for_an_option(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    async def conversation(ask: Ask) -> list[str]:
        return [
            await ask("status", run=f"--html={page}"),
            await ask("why", what="/dev/stdin"),
            await ask("plan", config=f"--html={page}"),
            await ask("diff", a="README.md", b=f"--html={page}"),
        ]

    assert all("exit code 0" not in shown.split("\n")[0] for shown in talk(runs, conversation))
    assert not page.exists()


def test_hostile_logs_are_data_and_never_become_an_act(living: RunDir) -> None:
    """A credulous agent tries whatever looks like a token, and finds nothing outside the data that logs could forge."""

    async def conversation(ask: Ask) -> tuple[set[str], list[str]]:
        seen: set[str] = set()
        for tool in ("logs", "spy"):
            _, data, after = parts_of(await ask(tool, run=living.name))
            seen.update(data)
            for _ in range(3 if tool == "logs" else 0):
                (key, line) = re.findall(r"more\(answer='(\w+)', from_line=(\d+)\)", after[-1])[0]
                _, data, after = parts_of(await ask("more", answer=key, from_line=int(line)))
                seen.update(data)
        forged = {token for line in seen for token in TOKEN.findall(line)}
        return forged, [await ask("confirm", token=token) for token in forged]

    forged, answers = talk(living.path.parent, conversation, "--act")
    assert len(forged) >= 2 and all(shown.startswith("confirm: nothing was done") for shown in answers)
    assert (read_waiting(living), read_acts(living)) == ([], [])
    assert query_attempt(living.attempt("0001")).state is JobState.RUNNING


def test_an_act_needs_its_own_token_once_and_is_logged_with_its_author(living: RunDir) -> None:
    async def conversation(ask: Any) -> list[str]:
        assert {tool.name for tool in (await ask.client.list_tools()).tools} == READ | ACT
        dump = await ask("control", run=living.name, verb="dump", why="an agent wants stacks")
        cancel = await ask("cancel", run=living.name, why="it is of no use")
        assert (read_waiting(living), read_acts(living)) == ([], [])
        (first,), (second,) = TOKEN.findall(dump), TOKEN.findall(cancel)
        return [await ask("confirm", token=token) for token in (first, first, second, second)]

    done, again, cancelled, late = talk(living.path.parent, conversation, "--act")
    assert (again.split("\n")[0], late.split("\n")[0]) == ("confirm: nothing was done", "confirm: nothing was done")
    (request,) = read_waiting(living)
    assert (request.verb, request.who, done.startswith("confirm: dump")) == ("dump", ME, True)
    assert request.why.startswith("an agent wants stacks (by agent ")
    begun, over = read_acts(living)
    assert (begun.what, begun.state, over.state, over.why) == ("cancel", "begun", "done", "it is of no use")
    assert over.who.startswith(f"{ME}, by agent ") and "cancel requested" in cancelled
    wait_until(lambda: query_attempt(living.attempt("0001")).state is JobState.CANCELLED)


def test_without_the_library_one_error_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "mcp.py").write_text("raise ModuleNotFoundError(\"No module named 'mcp'\", name='mcp')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([BSL, "mcp"], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (1, "") and "'.[mcp]'" in done.stderr


def test_the_skill_names_every_tool() -> None:
    done = subprocess.run([BSL, "mcp", "--skill"], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.startswith("---\nname: bsl\n")
    assert all(f"`{tool}`" in done.stdout for tool in READ | ACT)
