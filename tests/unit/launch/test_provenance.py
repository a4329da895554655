from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bigsci_launch.launch.provenance import (
    REDACTED,
    collect_provenance,
    describe_repository,
    redact_argument,
    redact_environment,
    uncommitted_changes,
)

SECRET_NAMES = [
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "WANDB_API_KEY",
    "MY_PASSWORD",
    "DB_PASS",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "Session_Cookie",
    "JWT",
    "github_pat",
    "MYPASS",
    "SLACK_WEBHOOK",
    "NETRC_LOGIN",
]
SECRET_VALUES = [
    "ghp_" + "a1B2" * 9,
    "hf_" + "abcdefgh" * 4,
    "AKIA" + "ABCDEFGH12345678",
    "glpat-" + "x" * 20,
    "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
    "0123456789abcdef" * 4,
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_telling_names_hide_the_whole_value(name: str) -> None:
    assert redact_environment({name: "hunter2"}) == {name: REDACTED}


@pytest.mark.parametrize("value", SECRET_VALUES)
def test_telling_values_are_hidden_under_any_name(value: str) -> None:
    assert redact_environment({"EXTRA": f"before {value} after"}) == {"EXTRA": f"before {REDACTED} after"}


def test_passwords_inside_addresses_are_hidden() -> None:
    hidden = redact_environment({"http_proxy": "http://alice:hunter2@proxy:3128/"})
    assert hidden == {"http_proxy": f"http://{REDACTED}@proxy:3128/"}


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://hooks.slack.com/services/T0/B0/abc", f"https://{REDACTED}"),
        ("https://discord.com/api/webhooks/1/abc", f"https://{REDACTED}"),
        ("https://host.example/path", "https://host.example/path"),
        ("+++ b/src/webhooks/handler.py", "+++ b/src/webhooks/handler.py"),
    ],
)
def test_an_address_that_is_a_password_is_hidden(address: str, shown: str) -> None:
    assert redact_environment({"ALERTS": address}) == {"ALERTS": shown}


@pytest.mark.parametrize(
    "name", ["PATH", "PWD", "OLDPWD", "HOME", "SLURM_CONF", "MONKEYS", "SSH_AUTH_SOCK", "BYPASS", "PATTERN"]
)
def test_harmless_names_stay(name: str) -> None:
    expected = REDACTED if name == "MONKEYS" else "/home/alice"  # KEY is in it: better one too many
    assert redact_environment({name: "/home/alice"}) == {name: expected}


def test_command_lines_are_redacted_too() -> None:
    assert redact_argument("env.HF_TOKEN.value=hunter2") == f"env.HF_TOKEN.value={REDACTED}"
    assert redact_argument("training.steps=10") == "training.steps=10"
    assert redact_argument("hf_" + "abcdefgh" * 4) == REDACTED


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for argv in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        if argv[0] == "add":
            (tmp_path / "train.py").write_text("lr = 1\n")
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *argv], cwd=tmp_path, check=True, timeout=20
        )
    return tmp_path


def test_a_clean_repository(repository: Path) -> None:
    described = describe_repository(repository)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=True)
    assert described["revision"] == head.stdout.strip()
    assert (described["root"], described["changed_files"]) == (str(repository.resolve()), [])
    assert uncommitted_changes(repository) == ""


def test_uncommitted_changes_are_kept_without_secrets(repository: Path) -> None:
    (repository / "train.py").write_text(f"lr = 2\nkey = '{SECRET_VALUES[0]}'\n")
    (repository / "new.py").write_text("")
    diff = uncommitted_changes(repository)
    assert "-lr = 1" in diff and "+lr = 2" in diff and REDACTED in diff and SECRET_VALUES[0] not in diff
    assert describe_repository(repository)["changed_files"] == [" M train.py", "?? new.py"]


def test_a_folder_in_no_repository(tmp_path: Path) -> None:
    described = describe_repository(tmp_path)
    assert described["root"] is None and "not in a git repository" in described["why"]


def test_everything_is_collected(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    found = collect_provenance(["bsl", "submit", "x.yaml"], repository)
    assert found.document["command"] == ["bsl", "submit", "x.yaml"]
    assert found.document["environment"]["HF_TOKEN"] == REDACTED
    assert found.document["packages"]["pydantic"]
    assert found.document["repositories"]["working_directory"]["root"] == str(repository.resolve())
    assert "hunter2" not in str(found.document)
