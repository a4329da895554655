"""Every signature is recognised in its own recording and in no other; whatever else is on the search path."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.errors import ConfigError
from bigsci_launch.spy.evidence.bundle import read_bundle
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.conclusion import Conclusion
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.known.library import Library, Signature, matches, name_hang, read_library, read_signature
from bigsci_launch.spy.show.report import to_lines
from tests.support.texts import has_parts

from ..conftest import an_hour_later, make_evidence, rank_of, recorded_evidence

Write = Callable[..., Path]

PACKAGED = read_library()
NAMES = [signature.name for signature in PACKAGED.signatures]
MAX_RECORDING_BYTES = 40_000
FILE = """\
explanation: It waits.
remedy: Do not wait.
source: [a test]
when:
  ranks:
    - stack: ["^load "]
"""


def signature_of(name: str) -> Signature:
    return next(signature for signature in PACKAGED.signatures if signature.name == name)


def recording_of(name: str) -> Path:
    return signature_of(name).path.parent / "recording"


@cache
def judged(name: str) -> tuple[Evidence, Conclusion]:
    bundle = read_bundle(recording_of(name))
    an_hour_later({"collection": bundle.collection, "nodes": bundle.nodes})
    evidence = bundle.evidence()
    return evidence, judge(evidence)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """`write("name", text)`: a signature of one's own on the search path; the path of its file."""
    monkeypatch.setenv("BSL_PATH", str(tmp_path))

    def make(name: str, text: str = FILE) -> Path:
        path = tmp_path / "signatures" / name / "signature.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        return path

    return make


def test_there_are_signatures_and_none_is_broken() -> None:
    assert len(NAMES) >= 25
    assert not PACKAGED.problems


@pytest.mark.parametrize("name", NAMES)
def test_it_matches_its_own_recording_and_no_other(name: str) -> None:
    signature = signature_of(name)
    assert [other for other in NAMES if matches(signature, *judged(other))] == [name]


@pytest.mark.parametrize("name", NAMES)
def test_its_recording_is_small_and_names_no_machine(name: str) -> None:
    files = [path for path in recording_of(name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_RECORDING_BYTES
    text = "".join(path.read_text() for path in files)
    assert not re.findall(r'"(?:/home|/root|/tmp|/work|/Users)[^"]*', text)
    assert all(re.fullmatch(r"n\d|jean-zay-iam\d\d", seen.node) for seen in judged(name)[0].ranks)


@pytest.mark.parametrize("name", NAMES)
def test_the_report_says_why_and_what_to_do_in_two_lines_each(name: str) -> None:
    evidence, conclusion = judged(name)
    lines = [line.text for line in to_lines(evidence, name_hang(evidence, conclusion, PACKAGED))]
    first = next(index for index, line in enumerate(lines) if line.startswith("  known"))
    if conclusion.if_hang is not None:
        assert not any(line.startswith("  remedy") for line in lines), "one look of py-spy is no reason to act"
        return
    remedy = next(index for index, line in enumerate(lines) if line.startswith("  remedy"))
    after = next(index for index in range(remedy + 1, len(lines)) if lines[index][:11].strip())
    assert f"{name}: " in lines[first]
    assert remedy - first <= 2
    assert after - remedy <= 2
    assert len(lines) <= 40


@pytest.mark.parametrize("name", ["healthy-1", "skip-1", "split-1", "spin-0", "deepspeed-skip-5"])
def test_what_is_no_known_hang_has_no_signature(name: str) -> None:
    evidence = recorded_evidence(name)
    assert name_hang(evidence, judge(evidence), PACKAGED).signature is None


def test_a_signature_of_ones_own_needs_a_file_and_nothing_else(write: Write) -> None:
    write("our-loader")
    evidence = make_evidence(
        [rank_of(0, "load@/src/data.py:7", wchan="x"), rank_of(1, "barrier@c10d:1", calls="0:barrier!")]
    )
    named = name_hang(evidence, judge(evidence), read_library())
    assert named.signature is not None
    assert (named.signature.name, named.signature.remedy) == ("our-loader", "Do not wait.")
    assert name_hang(evidence, judge(evidence), PACKAGED).signature is None


def test_ones_own_stands_in_place_of_a_packaged_one_of_the_same_name(write: Write) -> None:
    path = write("stale-build-lock")
    library = read_library()
    assert [signature.path for signature in library.signatures if signature.name == "stale-build-lock"] == [path]
    assert len(library.signatures) == len(NAMES)


def test_of_two_that_match_the_one_that_asks_for_more_is_named(write: Write) -> None:
    write("a-vague-one", FILE.replace("^load ", "file_baton"))
    assert name_hang(*judged("stale-build-lock"), read_library()).signature.name == "a-vague-one"  # type: ignore[union-attr]
    path = write("one-more-precise", FILE.replace('["^load "]', '["file_baton", "."]'))
    assert name_hang(*judged("stale-build-lock"), read_library()).signature.name == path.parent.name  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wrong", "line", "key", "text"),
    [
        (FILE.replace("remedy", "remidy"), 2, "remidy", "remedy?"),
        (FILE.replace('"^load "', '"^load ("'), 6, "when.ranks.0.stack.0", "regular expression"),
        (FILE.replace("- stack", "- wcham"), 6, "when.ranks.0.wcham", "when.ranks.0.wchan?"),
        (FILE.replace('stack: ["^load "]', "who: all"), 6, "when.ranks.0", ""),
        (FILE.replace("  ranks:\n", "  states: [hung]\n  ranks:\n"), 5, "when.states.0", "must be"),
        (FILE + "  classes: [skipped]\n", 7, "when.classes.0", ""),
        (FILE + "  classes: [H99]\n", 7, "when.classes.0", "`bsl hang-lab list`"),
        (FILE.replace("It waits.", "It waits. " * 60), 1, "explanation", "280"),
        ("explanation: [\n", 2, "", "not YAML"),
        ("", 0, "", ""),
    ],
)
def test_a_broken_file_is_named_with_line_and_key_and_hides_nothing(
    write: Write, wrong: str, line: int, key: str, text: str
) -> None:
    path = write("broken", wrong)
    with pytest.raises(ConfigError):
        read_signature(path)
    done = CliRunner().invoke(bsl, ["spy", "--bundle", str(recording_of("stale-build-lock"))])
    assert done.exit_code == 0, done.output
    warning = next(line for line in done.stderr.splitlines() if line.startswith("warning: "))
    assert has_parts(warning, f"{path}:{line}:" if line else path, f"{key}: " if key else "", text)
    assert "stale-build-lock" in done.stdout


def test_the_json_document_names_it() -> None:
    arguments = ["spy", "--bundle", str(recording_of("stale-build-lock")), "--json"]
    assert '"signature": "stale-build-lock"' in CliRunner().invoke(bsl, arguments).stdout


CONDITIONS = {
    "stack in order": ('stack: ["^inner ", "^outer "]', True),
    "stack in the other order": ('stack: ["^outer ", "^inner "]', False),
    "file of a frame": (r'stack: ["^inner .*/src/a\\.py$"]', True),
    "another file": (r'stack: ["^inner .*/src/b\\.py$"]', False),
    "without a call that is not there": ('without: "^absent "', True),
    "without a call that is there": ('without: "^outer "', False),
    "state": ("state: [D, S]", True),
    "another state": ("state: [T]", False),
    "wchan": ('wchan: "^pipe"', True),
    "another wchan": ('wchan: "^futex"', False),
    "call": (r'call: "write on fd 1 \\(pipe"', True),
    "another call": ('call: "read"', False),
    "child": ('child: "^worker T "', True),
    "another child": ('child: "^worker S "', False),
    "writing": ("writing: true", True),
    "not writing": ("writing: false", False),
    "error": ('error: "^OSError: disk"', True),
    "another error": ('error: "^ValueError"', False),
    "exit of a rank that lives": ('exit: "."', False),
    "all of it on one rank": ('{state: [S], wchan: "^pipe", stack: ["^inner "]}', True),
    "one thing less": ('{state: [S], wchan: "^pipe", stack: ["^absent "]}', False),
}


@pytest.mark.parametrize(("condition", "holds"), CONDITIONS.values(), ids=CONDITIONS)
def test_every_key_of_a_condition(write: Write, condition: str, holds: bool) -> None:
    rank = rank_of(
        0,
        "inner@/src/a.py:1 < middle@/src/a.py:2 < outer@/src/a.py:3",
        wchan="pipe_write",
        sample={
            "system_call": {"name": "write", "fd": 1, "target": "pipe:[7]"},
            "children": [{"pid": 9, "comm": "worker", "state": "T", "wchan": "do_signal_stop"}],
        },
    )
    for index, sample in enumerate(rank["samples"]):
        sample["io"] = {"wchar": 1000 * index}
    errors = [{"rank": 0, "type": "OSError", "message": "disk full"}]
    evidence = make_evidence([rank, rank_of(1, "barrier@c10d:1", calls="0:barrier!")], errors=errors)
    signature = read_signature(write("own", FILE.replace('stack: ["^load "]', condition)))
    assert matches(signature, evidence, judge(evidence)) == holds


@pytest.mark.parametrize(
    ("who", "num_showing", "holds"),
    [("some", 0, False), ("some", 1, True), ("most", 2, False), ("most", 3, True), ("all", 3, False), ("all", 4, True)],
)
def test_how_many_ranks_must_show_it(write: Write, who: str, num_showing: int, holds: bool) -> None:
    ranks = [rank_of(rank, f"{'load' if rank < num_showing else 'wait'}@/src/a.py:1") for rank in range(4)]
    evidence = make_evidence([*ranks, rank_of(4, None)])
    text = FILE.replace("- stack", f"- who: {who}\n      stack").replace("when:", "when:\n  states: [hang, unknown]")
    assert matches(read_signature(write("own", text)), evidence, judge(evidence)) == holds


def test_without_an_accused_rank_no_condition_on_suspects_holds(write: Write) -> None:
    evidence = make_evidence([rank_of(rank, "load@/src/a.py:1") for rank in range(4)])
    text = FILE.replace("when:", "when:\n  states: [hang, unknown]")
    assert not matches(read_signature(write("own", text)), evidence, judge(evidence))


def test_an_empty_library_names_nothing() -> None:
    evidence, conclusion = judged("stale-build-lock")
    assert name_hang(evidence, conclusion, Library((), ())) == conclusion


def test_no_two_signatures_say_the_same() -> None:
    files = [signature.file for signature in PACKAGED.signatures]
    for one, other in itertools.combinations(files, 2):
        assert one.explanation != other.explanation
        assert one.when != other.when
