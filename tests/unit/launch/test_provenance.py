from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bigsci_launch.config.masking import SECRET, is_known, is_secret_name, redact_text, shown_value
from bigsci_launch.launch.provenance import (
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


@pytest.mark.parametrize("name", [*SECRET_NAMES, "MY_CONN", "NEPTUNE", "SLURM_JWT", "CUDA_LICENSE_KEY"])
def test_only_variables_that_are_known_to_hold_no_secret_are_shown(name: str) -> None:
    assert not is_known(name) and shown_value(name, "hunter2") == SECRET


@pytest.mark.parametrize("name", ["PATH", "PWD", "HOME", "SLURM_CONF", "NCCL_DEBUG", "PYTHONPATH", "OMP_NUM_THREADS"])
def test_what_explains_a_run_is_shown(name: str) -> None:
    assert shown_value(name, "/home/alice") == "/home/alice"
    assert shown_value(name, f"/x/{SECRET_VALUES[0]}") == SECRET


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_telling_names_are_recognised(name: str) -> None:
    assert is_secret_name(name) and not is_secret_name("TOKENIZERS_PARALLELISM")


@pytest.mark.parametrize("value", SECRET_VALUES)
def test_telling_values_are_hidden_under_any_name(value: str) -> None:
    assert redact_environment({"EXTRA": f"before {value} after"}) == {"EXTRA": f"before {SECRET} after"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://alice:hunter2@proxy:3128/", "http://<secret>@proxy:3128/"),
        ("https://alice:pa/ss@word@proxy/", "https://<secret>@proxy/"),
        ("https://0a1b2c3d@sentry.example/1", "https://<secret>@sentry.example/1"),
        ("https://hooks.slack.com/services/T0/B0/abc", "https://<secret>"),
        ("https://discord.com/api/webhooks/1/abc", "https://<secret>"),
        ("https://chat.example/hooks/abc", "https://<secret>"),
        ("https://x.webhook.office.com/webhookb2/abc", "https://<secret>"),
        ("Endpoint=a;AccountKey=Zm9vYmFy==;Suffix=b", "Endpoint=a;AccountKey=<secret>;Suffix=b"),
        ("https://blob.example/c?sv=1&sig=abc%2F&se=2", "https://blob.example/c?sv=1&sig=<secret>&se=2"),
        ("Authorization: Bearer abcdefgh12", "Authorization: Bearer <secret>"),
        ("https://host.example/path", "https://host.example/path"),
        ("+++ b/src/webhooks/handler.py", "+++ b/src/webhooks/handler.py"),
    ],
)
def test_addresses_and_words_that_are_passwords_are_hidden(text: str, shown: str) -> None:
    assert redact_text(text) == shown


def test_command_lines_are_redacted_too() -> None:
    assert redact_argument("env.HF_TOKEN.value=hunter2") == f"env.HF_TOKEN.value={SECRET}"
    assert redact_argument("env.MY_CONN.value=hunter2") == "env.MY_CONN.value=<secret>"
    assert redact_argument("--set=env={MY_CONN: {value: hunter2}}") == "--set=env=<secret>"
    assert redact_argument("monitor.notify.webhook=https://x/T0") == "monitor.notify.webhook=<secret>"
    assert redact_argument("training.steps=10") == "training.steps=10"
    assert redact_argument("hf_" + "abcdefgh" * 4) == SECRET


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for argv in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        if argv[0] == "add":
            (tmp_path / "train.py").write_text("lr = 1\n")
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *argv], cwd=tmp_path, check=True, timeout=300
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
    assert "-lr = 1" in diff and "+lr = 2" in diff and SECRET in diff and SECRET_VALUES[0] not in diff
    assert describe_repository(repository)["changed_files"] == [" M train.py", "?? new.py"]


def test_a_folder_in_no_repository(tmp_path: Path) -> None:
    described = describe_repository(tmp_path)
    assert described["root"] is None and described["why"]


def test_everything_is_collected(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "MY_CONN", "NCCL_HOOK"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    found = collect_provenance(["bsl", "submit", "x.yaml"], repository, {"NCCL_HOOK"})
    assert found.document["command"] == ["bsl", "submit", "x.yaml"]
    assert found.document["environment"]["NCCL_DEBUG"] == "INFO" and "hunter2" not in json.dumps(found.document)
    assert {"HF_TOKEN", "MY_CONN", "NCCL_HOOK"} < set(found.document["other_variables"])
    assert found.document["packages"]["pydantic"]
    assert found.document["repositories"]["working_directory"]["root"] == str(repository.resolve())
    assert "hunter2" not in str(found.document)
