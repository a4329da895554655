"""The rows of `bsl top`: their order, the selection that stays with its row, and what fits on a small screen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigsci_launch.runs.layout import RunDir
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.styled_lines import BOLD, SOFT, StyledLine, cells, changed_cells, cut
from bigsci_launch.top.draw import list_lines, rows_in
from bigsci_launch.top.output import CommandOutput, output_lines
from bigsci_launch.top.rows import (
    ORDERS,
    TopDetails,
    TopRow,
    TopState,
    moved,
    next_order,
    with_details,
    with_rows,
    with_words,
)

NOW = 1_000_000.0


def row(name: str, state: JobState = JobState.RUNNING) -> TopRow:
    return TopRow(name, name, JobInfo(f"1{name}", state, state.value, "squeue", hostlist="n[1-2]"))


def details(state: JobState = JobState.RUNNING, **fields: object) -> TopDetails:
    return TopDetails(replace(row("x", state).job or JobInfo("", state, "", "")), **fields)  # type: ignore[arg-type]


def shown(lines: list[StyledLine]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


def keys(state: TopState) -> list[str]:
    return [each.key for each in state.rows]


@pytest.fixture
def state() -> TopState:
    rows = [row("b", JobState.PENDING), row("a", JobState.COMPLETED), row("d"), row("c")]
    return with_rows(TopState(), rows, NOW)


def test_what_needs_a_person_is_first_and_then_what_runs(state: TopState) -> None:
    assert keys(state) == ["c", "d", "b", "a"]
    found = with_details(
        state, {"d": details(findings=("it hangs",)), "a": details(JobState.COMPLETED, findings=("x",))}
    )
    assert keys(found) == ["d", "c", "b", "a"]


def test_the_selection_stays_with_its_row(state: TopState) -> None:
    chosen = moved(state, 1, 10)
    assert chosen.selected == "d"
    found = with_details(chosen, {"d": details(findings=("it hangs",))})
    assert (found.at, found.row and found.row.key) == (0, "d")
    assert with_rows(found, [row("c"), row("e")], NOW).selected == "c", "it is gone: the first one"


def test_the_first_row_is_selected_until_another_one_is_chosen(state: TopState) -> None:
    ended = {"c": details(JobState.COMPLETED)}
    rows = [row("c", JobState.COMPLETED), row("d"), row("e")]
    assert state.selected == "c" and with_rows(with_details(state, ended), rows, NOW).at == 0
    back = moved(moved(state, 1, 10), -1, 10)
    assert back.selected == "c" and with_rows(back, rows, NOW).selected == "d"


def test_a_move_ends_at_the_edges_and_scrolls(state: TopState) -> None:
    state = with_rows(state, [row(f"r{number:04d}") for number in range(5000)], NOW)
    last = moved(state, 1_000_000, 19)
    assert (last.at, last.first) == (4999, 4981)
    assert [each.key for each in last.visible(19)][-1] == "r4999"
    assert moved(last, -18, 19).first == 4981 and moved(last, -19, 19).first == 4980
    assert moved(TopState(), 1, 19) == TopState()


def test_words_are_found_in_name_job_and_state_and_taken_away_again(state: TopState) -> None:
    assert keys(with_words(state, "1d RUNN")) == ["d"]
    assert keys(with_words(state, "nothing")) == [] and with_words(state, "nothing").row is None
    assert keys(with_words(with_words(state, "nothing"), "")) == keys(state)


def test_each_order_ends_in_the_first_again(state: TopState) -> None:
    state = with_details(state, {"b": details(step=7, gpu_hours=1.0), "a": details(step=3, gpu_hours=9.0)})
    orders = {}
    for _ in ORDERS:
        orders[state.order] = keys(state)
        state = next_order(state)
    assert orders["name"] == ["a", "b", "c", "d"]
    assert (orders["step"][:2], orders["GPU-hours"][:2]) == (["b", "a"], ["a", "b"])
    assert state.order == ORDERS[0]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (132, 43), (200, 60), (20, 6)])
def test_every_line_fits_on_the_screen(state: TopState, width: int, height: int) -> None:
    wild = {"d": details(findings=("x" * 500,), loss=float("nan"), step=10**9, next="y\n" * 300, gpu_hours=1e7)}
    lines = shown(list_lines(with_details(state, wild), width, height, NOW))
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert not any("\n" in line for line in lines)
    assert rows_in(height) >= 1


def test_what_is_not_known_is_a_dash_and_what_was_not_read_are_dots(state: TopState) -> None:
    unread = with_rows(TopState(), [TopRow("u", "u", None)], NOW)
    assert shown(list_lines(unread, 80, 24, NOW))[2].split() == ["u", "...", "-", "-", "-", "-", "-"]
    read = with_details(
        state, {"c": details(step=7, total_steps=9, seconds=1.5, loss=2.25, phase="save", gpu_hours=12.0)}
    )
    assert shown(list_lines(read, 80, 24, NOW))[2].split() == ["c", "RUNNING", "7/9", "1.5", "2.25", "save", "12"]


def test_letters_of_two_columns_keep_the_columns_in_line(state: TopState) -> None:
    wide = with_rows(state, [row("d"), row("実験データ解析テスト名前"), row("e\u0301clair")], NOW)
    lines = shown(list_lines(wide, 80, 24, NOW))
    assert {cells(line[: line.index("RUNNING")]) for line in lines[2:5]} == {19}
    assert cells(shown([cut([("a実験", {}), ("b", {})], 4)])[0]) == 3, "a letter of two columns does not fit into one"


def test_only_what_changed_is_drawn_again() -> None:
    before: StyledLine = [("bsl top", BOLD), ("  12:00:00", SOFT), ("  3 running", {})]
    assert changed_cells(before, [before[0], ("  12:00:01", SOFT), before[2]]) == 17
    assert changed_cells(before, [before[0], ("  9:00:01", SOFT), before[2]]) is None, "what follows has moved"
    assert changed_cells(before, [*before[:2], ("  4 running", {})]) == 28


def test_a_name_or_a_step_that_is_too_long_moves_no_column(state: TopState) -> None:
    long = {"c": details(step=1_000_000, total_steps=20_000_000, loss=2.5)}
    line = shown(list_lines(with_details(with_rows(state, [row("c"), row(">x")], NOW), long), 80, 24, NOW))
    assert line[2].split()[:4] == [">x", "RUNNING", "-", "-"] and line[3].split()[2] == "1000000"
    assert line[2].index("RUNNING") == line[3].index("RUNNING")


def test_numbers_in_names_are_in_their_order_and_runs_before_other_jobs(state: TopState) -> None:
    run = replace(row("z"), run=RunDir(Path("z")))
    assert keys(with_rows(state, [row("eval-10"), row("eval-9"), run], NOW)) == ["z", "eval-9", "eval-10"]


def test_slurm_that_gives_no_answer_is_said(state: TopState) -> None:
    trouble = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    lines = shown(list_lines(with_rows(state, [], NOW, trouble), 80, 24, NOW))
    assert lines[0].endswith("no answer from Slurm") and lines[-2] == trouble


def test_output_follows_the_end_until_it_is_scrolled() -> None:
    output = CommandOutput("bsl spy x", 80)
    output.add("".join(f"line {number}\n" for number in range(100)) + "torn")
    assert output.visible(12)[-1] == "line 99"
    output.scroll(-5, 12)
    output.add(" is whole\n")
    assert output.visible(12)[-1] == "line 94"
    output.scroll(100, 12)
    output.end(1)
    lines = shown(output_lines(output, 80, 12))
    assert (lines[0], lines[-2].strip(), len(lines)) == ("bsl spy x", "torn is whole", 12) and "code 1" in lines[-1]


def test_long_lines_of_output_are_folded_and_nothing_is_lost() -> None:
    output = CommandOutput("bsl logs x", 10)
    output.add("0123456789abc\n\n実験データ解析\n")
    assert list(output.visible(12)) == ["0123456789", "abc", "", "実験データ", "解析"]


def test_a_command_may_print_what_a_terminal_would_obey() -> None:
    output = CommandOutput("bsl logs x", 80)
    output.add("\x1b]0;title\x07\x1b[2Jtext\n")
    assert all(letter.isprintable() for line in shown(output_lines(output, 80, 12)) for letter in line)
