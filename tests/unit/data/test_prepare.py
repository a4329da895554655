"""From text to tokens and back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.data.indexed import open_dataset, tokenizer_path
from bigsci_launch.data.prepare import END_OF_DOCUMENT, find_texts, prepare_dataset, read_text
from bigsci_launch.errors import DataError

tokenizers = pytest.importorskip("tokenizers")

TEXTS = {
    "b/two.py": "def area(width, height):\n    return width * height\n" * 6,
    "a.py": "for word in words:\n    print(word, file=stream)  # ünïcödé <|endoftext|>\n" * 6,
    "notes.txt": "not code",
    "empty.py": "",
}
VOCABULARY = 300


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    for name, text in TEXTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_every_text_comes_back_from_its_document(corpus: Path, tmp_path: Path) -> None:
    made = prepare_dataset(corpus, tmp_path / "out" / "d", VOCABULARY, "*.py")
    dataset = open_dataset(tmp_path / "out" / "d")
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path(made.prefix)))
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    texts = []
    for index in range(dataset.num_documents):
        tokens = dataset.sequence(index).tolist()
        assert tokens[-1] == end
        assert end not in tokens[:-1]
        texts.append(tokenizer.decode(tokens[:-1], skip_special_tokens=False))
    assert texts == [TEXTS["a.py"], TEXTS["b/two.py"], TEXTS["empty.py"]]
    assert (made.num_documents, made.num_tokens, made.vocab_size) == (3, dataset.num_tokens, VOCABULARY)
    assert dataset.tokens.max() < VOCABULARY


def test_the_same_folder_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare_dataset(corpus, tmp_path / name / "d", VOCABULARY, "*.py")
    files = [sorted((tmp_path / name).iterdir()) for name in ("one", "two")]
    assert [path.name for path in files[0]] == ["d.bin", "d.idx", "d.tokenizer.json"]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_progress_counts_both_passes(corpus: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    prepare_dataset(corpus, tmp_path / "d", VOCABULARY, "*.py", lambda done, text: seen.append((done, text)))
    assert seen == [(1, "read"), (2, "read"), (3, "read"), (4, "encode"), (5, "encode"), (6, "encode")]


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"caf\xe9")
    assert read_text(path) == "caf\N{REPLACEMENT CHARACTER}"


def test_what_cannot_be_prepared_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        find_texts(tmp_path / "nowhere", "*")
    with pytest.raises(DataError, match=r"\*\.rs"):
        find_texts(corpus, "*.rs")
    with pytest.raises(DataError, match="257"):
        prepare_dataset(corpus, tmp_path / "d", 256)
    with pytest.raises(DataError, match="5000"):
        prepare_dataset(corpus, tmp_path / "d", 5000, "*.py")
    assert not list(tmp_path.glob("d*"))


def test_an_unreadable_file_is_named(corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Root reads every file, except some in /proc.
    broken = Path("/proc/self/mem")
    with pytest.raises(DataError, match="/proc/self/mem: Input/output error"):
        read_text(broken)


def test_the_command_tells_what_it_made(corpus: Path, tmp_path: Path) -> None:
    arguments = [
        "data",
        "prepare",
        str(corpus),
        "--output",
        str(tmp_path / "d"),
        "--vocab-size",
        "300",
        "--glob",
        "*.py",
    ]
    told = CliRunner().invoke(bsl, arguments)
    assert told.exit_code == 0, told.output
    assert f"{tmp_path / 'd'}: 3 documents, " in told.stdout
    as_json = CliRunner().invoke(bsl, [*arguments, "--json"])
    assert json.loads(as_json.stdout)["num_documents"] == 3


def test_the_command_refuses_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused = CliRunner().invoke(
        bsl, ["data", "prepare", str(tmp_path / "empty"), "--output", str(tmp_path / "d"), "--vocab-size", "300"]
    )
    assert refused.exit_code == 2
    assert "no file matches '*'" in refused.stderr
