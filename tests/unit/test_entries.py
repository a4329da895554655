"""What is known about the output of other programs: read from files, from folders of users, and from an archive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bigsci_launch.entries import parse_entries, read_entries
from bigsci_launch.errors import ConfigError
from bigsci_launch.launch.job import frozen

FORM = "# a comment\n[mine]\nline = step=(?P<step>\\d+) 100%\n    and more = x\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of entries on `$BSL_PATH`."""
    folder = tmp_path / "step_lines"
    folder.mkdir()
    (folder / "mine.ini").write_text(FORM)
    (folder / "notes.txt").write_text("not an entry")
    monkeypatch.setenv("BSL_PATH", str(tmp_path))
    return folder


def test_files_of_the_user_come_first(own: Path) -> None:
    first = read_entries("step_lines")[0]
    assert (first.file, first.name) == (str(own / "mine.ini"), "mine")
    assert first.fields == {"line": "step=(?P<step>\\d+) 100%\nand more = x"}
    assert read_entries("no_such_folder") == []


@pytest.mark.parametrize("text", ["line = 1\n", "[a]\nline\n", "[a]\nx = 1\n[a]\n", "\x00"])
def test_what_is_no_ini_file_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"broken\.ini"):
        list(parse_entries(text, "broken.ini"))


def test_the_program_of_a_job_script_has_them_too(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts without site-packages, and later than the folder of the user may be there."""
    monkeypatch.setattr(frozen, "ENTRY", "bigsci_launch.entries")
    archive = tmp_path / "job.pyz"
    archive.write_bytes(frozen.job_program())
    (own / "mine.ini").unlink()
    program = (
        f"import sys, json; sys.path.insert(0, {str(archive)!r}); from bigsci_launch.entries import read_entries; "
        "print(json.dumps([[each.name, dict(each.fields)] for each in read_entries('step_lines')]))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[0] == ["mine", {"line": "step=(?P<step>\\d+) 100%\nand more = x"}]


def test_an_error_quotes_the_beginning_of_a_long_line() -> None:
    with pytest.raises(ConfigError, match="no INI file") as caught:
        list(parse_entries("[a]\n" + "x" * 100_000 + "\n", "ours.ini"))
    assert len(caught.value.message) < 400
