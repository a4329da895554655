"""The manual becomes a site without a warning: each page is in the navigation, each link and anchor leads somewhere."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS_THEME = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="the extra `docs` is not installed: pip install -e '.[docs]'"
)


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(argv, cwd=project, env=variables, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of the manual as it is."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@NEEDS_THEME
def test_the_manual_is_a_site_without_a_warning(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    pages = {path.with_name("index.html") if path.name == "README.html" else path for path in pages}
    assert all((site / page).is_file() for page in pages)
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    assert not list(site.rglob("*.py"))


@NEEDS_THEME
def test_no_page_asks_another_server_for_anything(site: Path) -> None:
    asked = ('src="http', 'src="//', 'rel="stylesheet" href="http', 'rel="preconnect"')
    assert not [page for page in site.rglob("*.html") if any(word in page.read_text("utf-8") for word in asked)]


@NEEDS_THEME
def test_links_to_nothing_and_a_page_that_is_not_in_the_navigation_are_errors(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "docs" / "how-to" / "new.md").write_text("# New\n", encoding="utf-8")
    with (tmp_path / "docs" / "README.md").open("a", encoding="utf-8") as page:
        page.write("\n[a](gone.md) [b](how-to/spy.md#nowhere)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert all(word in done.stderr for word in ("gone.md", "#nowhere", "how-to/new.md")), done.stderr
