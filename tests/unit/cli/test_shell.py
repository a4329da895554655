"""What a shell has of `bsl`: names that Tab completes, man pages, colours, and the page of a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.runs.layout import RunDir, write_json

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
BASH = """source {file}
COMP_WORDS=({words}); COMP_CWORD={last}
_bsl_completion bsl; for each in "${{COMPREPLY[@]}}"; do echo "${{each%% *}}"; done"""
ZSH = """autoload -Uz compinit; compinit -u -d {home}/dump
compdef() {{ : }}
_describe() {{ print -rl -- ${{(P)3}} }}
compadd() {{ print -rl -- ${{(P)5}} }}
words=({words}); CURRENT={after}
source {file} 2>/dev/null; _bsl_completion 2>/dev/null"""
FISH = """source {file}; complete -C '{line}'"""


def bsl(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [BIN / "bsl", *words], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a run, `nightly-7b`, in `runs`."""
    run = RunDir(tmp_path / "runs" / "nightly-7b")
    run.attempt("0001").make()
    write_json(run.record, {"name": "nightly-7b"})
    return tmp_path


COMPLETED = [
    ("bsl status night", "nightly-7b"),
    ("bsl plan calibrate rows.csv --site jean-zay-a", "jean-zay-a100"),
    ("bsl submit run.yaml --set training.micro_batch_s", "training.micro_batch_size"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "wanted"), COMPLETED)
@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_tab_completes_what_the_installed_file_says(home: Path, shell: str, line: str, wanted: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = bsl("completion", "install", shell, HOME=str(home))
    file = Path(done.stdout.removeprefix("wrote ").strip())
    assert file.is_file() and file.is_relative_to(home)
    words = line.split()
    script = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell].format(
        file=file, line=line, words=" ".join(words), last=len(words) - 1, after=len(words), home=home
    )
    environment = {"HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}", "BSL_RUNS": str(home / "runs")}
    shown = subprocess.run(
        [shell, "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert wanted in shown.stdout.replace("\t", " ").replace(":", " ").split(), (shown.stdout, shown.stderr)


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("name", ["bsl", "bsl-control", "bsl-checkpoint"])
def test_man_pages_are_typeset_without_a_warning(name: str) -> None:
    page = ROOT / "docs" / "reference" / "man" / f"{name}.1"
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-ww", page], capture_output=True, text=True, timeout=300, check=True
    )
    assert (done.stderr, bool(done.stdout)) == ("", True)


@pytest.mark.parametrize(
    ("variables", "is_coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colours_follow_the_environment(variables: dict[str, str], is_coloured: bool) -> None:
    recording = ROOT / "diagnostics" / "signatures" / "stale-build-lock" / "recording"
    unset = {"FORCE_COLOR": "", "NO_COLOR": ""}
    assert ("\x1b[" in bsl("spy", "--bundle", str(recording), **{**unset, **variables}).stdout) is is_coloured


@pytest.mark.slow
def test_open_shows_the_page_or_says_where_to_copy_it_from(home: Path) -> None:
    page = home / "state" / "bsl" / "pages" / "nightly-7b.html"
    browser = home / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {home}/shown\n')
    browser.chmod(0o755)
    known: Any = {"BSL_RUNS": str(home / "runs"), "XDG_STATE_HOME": str(home / "state"), "BROWSER": f"{browser} %s"}
    copied = bsl("open", "nightly-7b", **known, DISPLAY="", WAYLAND_DISPLAY="")
    assert copied.stdout.startswith("scp ") and copied.stdout.endswith(f":{page} .\n")
    assert page.read_text().startswith("<!doctype html>") and not (home / "shown").exists()
    assert bsl("open", "nightly-7b", **known, DISPLAY=":0").stdout == f"opened {page}\n"
    assert (home / "shown").read_text().strip() == page.as_uri()


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("status nigthly-7b", "nightly-7b"),
        ("kill nightly-7b", "bsl cancel"),
        ("cluster start", "bsl cluster up"),
        ("config validate run.yaml", "bsl config check"),
        ("cluster statsu", "status"),
    ],
)
def test_a_word_that_is_wrong_names_the_one_that_is_meant(home: Path, words: str, meant: str) -> None:
    done = bsl(*words.split(), BSL_RUNS=str(home / "runs"))
    said = done.stderr.splitlines()
    assert done.returncode == 2 and any("did you mean" in line.lower() and meant in line for line in said), said


def test_a_run_that_is_like_no_other_suggests_none(home: Path) -> None:
    assert "did you mean" not in bsl("status", "llama", BSL_RUNS=str(home / "runs")).stderr


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.slow
def test_names_of_files_are_utf_8_in_every_locale(tmp_path: Path) -> None:
    folder = tmp_path / "Größe"
    folder.mkdir()
    settings = {"run": {"name": "nano", "root": f"{folder}/läufe", "command": ["bash", "-c", "echo grüße ≥"]}}
    settings["slurm"] = {"site": "local"}
    (folder / "lauf-ä.yaml").write_text(json.dumps(settings, ensure_ascii=False))
    submitted = bsl("submit", str(folder / "lauf-ä.yaml"), "--set", f"run.root={folder}/größer", **ASCII)
    assert submitted.returncode == 0 and "grüße ≥" in submitted.stderr, submitted.stderr
    run, page = str(folder / "größer" / "nano"), folder / "bericht-ü.html"
    assert run in bsl("status", run, "--html", str(page), **ASCII).stdout
    assert run in page.read_text()


def test_what_a_locale_cannot_print_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "ä≥.yaml").write_text(json.dumps({"run": {"name": "nano", "command": ["true"]}}))
    done = subprocess.run(
        [BIN / "bsl", "config", "check", tmp_path / "ä≥.yaml", "--set", "slurm.site=local"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.startswith(
        f"{tmp_path}/\xe4\\u2265.yaml".encode("latin-1")
    )
