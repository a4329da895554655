"""Builds what a release consists of, into one folder: wheels, sdist, `bsl.pyz`, an SBOM and SHA256SUMS.

    python release/release.py build/release

It needs no network: what is built is in this tree, and hatchling and the libraries of `bsl.pyz` are installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAME = "bigsci-launch"
REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    run(build)
    run([*build, "-t", "wheel"], BSL_NATIVE="1")
    run([sys.executable, "release/build_pyz.py", str(folder / "bsl.pyz")])
    (folder / "sbom.cdx.json").write_text(json.dumps(sbom(), indent=2) + "\n")
    files = sorted(folder.iterdir())
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(sums))
    for file in files:
        print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.name}")


def run(argv: list[str], **variables: str) -> None:
    subprocess.run(argv, cwd=ROOT, env={**os.environ, **variables}, check=True)


def sbom() -> dict[str, Any]:
    """Return a CycloneDX document: the package, and what a base installation brings, as it is installed here."""
    own = distribution(NAME)
    version = (ROOT / "bigsci_launch" / "__init__.py").read_text().split('__version__ = "')[1].partition('"')[0]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**component(own), "type": "application", "version": version}},
        "components": [component(each) for each in needed(own)],
    }


def needed(top: Distribution) -> list[Distribution]:
    """Return what a distribution requires without extras, directly or not, by name."""
    found: dict[str, Distribution] = {}
    waiting = [top]
    while waiting:
        for line in waiting.pop().requires or ():
            match = REQUIREMENT.match(line)
            if match is None or "extra ==" in line or match[0].lower() in found:
                continue
            try:
                found[match[0].lower()] = distribution(match[0])
            except PackageNotFoundError:  # for another platform or version of Python
                continue
            waiting.append(found[match[0].lower()])
    return [found[name] for name in sorted(found)]


def component(each: Distribution) -> dict[str, Any]:
    name = each.metadata["Name"].lower()
    licence = each.metadata.get("License-Expression") or each.metadata.get("License") or "unknown"
    return {
        "type": "library",
        "name": name,
        "version": each.version,
        "purl": f"pkg:pypi/{name}@{each.version}",
        "licenses": [{"license": {"name": licence.splitlines()[0][:80]}}],
    }


if __name__ == "__main__":
    main()
