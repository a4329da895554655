"""Where content is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.content import content_folders, packaged


def test_what_comes_with_bsl_is_there() -> None:
    assert packaged("slurm", "sites", "local.yaml").is_file()
    assert packaged("diagnostics", "signatures").is_dir()


def test_folders_come_in_the_order_in_which_they_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BSL_PATH", raising=False)
    own = Path("/own")
    assert content_folders("sites", own) == [own]
    monkeypatch.setenv("BSL_PATH", "/a::b c")
    expected = [Path("near/sites"), Path("/a/sites"), Path("b c/sites"), own]
    assert content_folders("sites", own, Path("near")) == expected
    assert content_folders("sites", own) == expected[1:]
