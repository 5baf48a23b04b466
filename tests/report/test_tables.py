"""Numbers as people read them, and tables that fit a terminal."""

import math

import pytest

from k3.report.tables import WIDTH, markdown, number, render, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (2_779_484_476_000, "2,779,484,476,000"),
        (21_334.4, "21,334"),
        (1.52349, "1.52"),
        (0.0312, "0.0312"),
        (0.000012, "1.20e-05"),
        (0.0, "0.00"),
        (math.nan, "nan"),
        (True, "True"),
        ("text", "text"),
    ],
)
def test_number(value: object, text: str):
    assert number(value) == text


def test_size():
    assert [size(n) for n in (999, 1_412_345, 2_779_484_476_000)] == ["999", "1.41M", "2.78T"]


def test_columns_align_and_numbers_go_right():
    lines = render([("nano", 5), ("plain", 12345)], head=("name", "tokens")).split("\n")
    assert lines == ["name   tokens", "-----  ------", "nano        5", "plain  12,345"]


def test_wide_text_is_cut_and_numbers_are_not():
    text = render([("x" * 300, 123_456_789, "y" * 20)], head=("what", "count", "note"))
    assert max(map(len, text.split("\n"))) <= WIDTH
    assert "123,456,789" in text and "…" in text and "y" * 20 in text


def test_empty():
    assert render([]) == "" and "head" in render([], head=("head",))


def test_markdown_escapes_bars():
    assert markdown([("a|b", 1)], ("x", "y")) == "| x | y |\n| --- | --- |\n| a\\|b | 1 |"
