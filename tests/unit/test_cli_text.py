"""Tables and names: ids are never cut, and nothing from a user reaches the terminal raw."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.cli.secrets_hidden import hide_secret_values, secret_looking_argument
from testbed.cli.text import (
    Column,
    cell_width,
    plain,
    screen_width,
    table,
    use_color,
)

COLUMNS = (Column("ID", right=True), Column("NAME", cut=True), Column("STATE"))


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(st.text())
def test_plain_text_moves_no_cursor_and_can_be_written_anywhere(text):
    shown = plain(text)
    assert shown.isprintable()
    shown.encode("utf-8")


def test_plain_keeps_what_is_harmless():
    assert plain("Größe [red]x[/red] 名前") == "Größe [red]x[/red] 名前"
    assert plain("a\x1b[31mb\n\udcff\u202e") == "a\\x1b[31mb\\n\\udcff\\u202e"


def test_columns_line_up_with_wide_and_combining_characters():
    lines = table(COLUMNS, [("1", "名前", "UP"), ("22", "e\u0301x", "UP")])
    starts = [
        cell_width(line[: line.rindex(word)])
        for line, word in zip(lines, ("STATE", "UP", "UP"), strict=True)
    ]
    assert len(set(starts)) == 1


@given(
    st.lists(st.tuples(st.integers(1, 10**12), st.text(max_size=80)), min_size=1, max_size=5),
    st.integers(1, 200),
)
def test_ids_and_states_are_never_cut_and_the_rest_only_when_needed(jobs, width):
    rows = [(str(job_id), name, "OUT_OF_MEMORY") for job_id, name in jobs]
    lines = table(COLUMNS, rows, width=width)
    assert len(lines) == len(rows) + 1
    for line, (job_id, name, _) in zip(lines[1:], rows, strict=True):
        assert line.split()[0] == job_id
        assert line.endswith("OUT_OF_MEMORY")
        if "…" not in line:
            assert plain(name).rstrip() in line
    full = table(COLUMNS, rows)
    if all(cell_width(line) <= width for line in full):
        assert lines == full


def test_a_narrow_screen_cuts_names():
    lines = table(COLUMNS, [("1", "n" * 100, "RUNNING")], width=30)
    assert all(cell_width(line) <= 30 for line in lines)
    assert "…" in lines[1]


def test_columns_line_up_in_an_encoding_that_lacks_letters():
    rows = [("1", "名前é" * 4, "UP"), ("22", "plain", "UP")]
    for width in (None, 30):
        lines = table(COLUMNS, rows, width=width, encoding="ascii")
        assert all(line.isascii() for line in lines)
        assert (
            len(
                {line.rindex(word) for line, word in zip(lines, ("STATE", "UP", "UP"), strict=True)}
            )
            == 1
        )
    assert "..." in lines[1]
    assert all(len(line) <= 30 for line in lines)


@pytest.mark.parametrize(
    ("environ", "stream", "expected"),
    [
        ({}, Tty(), True),
        ({}, io.StringIO(), False),
        ({"NO_COLOR": "1"}, Tty(), False),
        ({"NO_COLOR": ""}, Tty(), True),
        ({"TERM": "dumb"}, Tty(), False),
        ({"FORCE_COLOR": "1"}, io.StringIO(), True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, Tty(), True),
    ],
)
def test_colour_follows_the_conventions(environ, stream, expected):
    assert use_color(stream, environ) is expected


@pytest.mark.parametrize(
    ("environ", "width"), [({}, None), ({"COLUMNS": "40"}, 40), ({"COLUMNS": "wide"}, None)]
)
def test_piped_output_is_as_wide_as_it_needs_unless_columns_says_otherwise(environ, width):
    assert screen_width(io.StringIO(), environ) == width


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        ("HF_TOKEN", "x", True),
        ("WANDB_API_KEY", "x", True),
        ("DB_PASSWORD", "x", True),
        ("AWS_SECRET_ACCESS_KEY", "x", True),
        ("my_secret", "x", True),
        ("NOTE", "hf_abcdefghijklmnopqrstuv", True),
        ("PATH", "/bin", False),
        ("KEYBOARD", "de", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("MONKEY", "x", False),
    ],
)
def test_secret_looking_values_are_not_shown(name, value, hidden):
    assert hide_secret_values({name: value}) == {name: "***" if hidden else value}


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["train", "--api-key", "abc"], "--api-key"),
        (["train", "--password=abc"], "--password"),
        (["train", "hf_abcdefghijklmnopqrstuv"], "argument 1"),
        (["train", "--token", "$TOKEN"], None),
        (["train", "--tokens", "--steps"], None),
        (["train", "--tokenizer", "bert"], None),
        (["train", "--steps", "3"], None),
    ],
)
def test_a_secret_on_the_command_line_is_noticed(argv, found):
    assert secret_looking_argument(argv) == found
