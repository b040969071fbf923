"""Text for people: lines that fit a terminal, words that stay whole."""

from __future__ import annotations

import sys

import pytest

from onnx_backprop.converters.tables import columns, fitting, sparkline, table, wrapped

HEADER = ("operator", "node", "gradient", "by", "")
ROWS = [
    ("ConvTranspose-22", "/features/features.0/up/ConvTranspose", "served", "conv.conv_transpose", ""),
    ("Relu-14", "/relu", "served", "activation.relu", "its rule gives no gradient to somewhere over the rainbow"),
]


@pytest.fixture(params=[40, 60, 80, 100, 200])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def test_files_and_pipes_get_whole_lines_and_commands_tables_of_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")  # which some tools set for all their children
    assert columns() is None
    assert wrapped("word " * 50) == "word " * 50
    assert [len(line) > 80 for line in table(HEADER, ROWS)] == [False, True, True]
    with fitting():
        assert max(map(len, table(HEADER, ROWS))) <= 100
        wide = table(("node", ""), [("StatefulPartitionedCall/block/Conv2D;" * 5, "1")])
    assert max(map(len, wide)) <= 100
    assert "".join(wide).count("Conv2D") == 5


def test_tables_fit(width: int) -> None:
    lines = table(HEADER, ROWS)
    assert columns() == width
    assert max(map(len, lines)) <= width
    joined = "".join("".join(lines).split())
    if width >= 80:  # columns: cells are found piece by piece
        for piece in ("features.0/", "ConvTranspose-22", "activation.", "rainbow", "somewhere"):
            assert any(piece in line for line in lines)
        assert lines[0].split() == ["operator", "node", "gradient", "by"]
    else:  # paragraphs: cells are whole
        assert "node:/features/features.0/up/ConvTranspose;gradient:served" in joined
    assert len(lines) == 3 or width < 200


def test_words_stay_whole(width: int) -> None:
    text = (
        "a sentence that names /a/file/of/some/folder/with/a/long/name.onnx and goes on for longer than a line\n\n  x"
    )
    lines = wrapped(text).split("\n")
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    assert " ".join(wrapped(text).split()) == " ".join(text.split())
    assert lines[-2:] == ["", "  x"]
    assert all(line.startswith("  ") for line in lines[1:-2])


def test_a_terminal_without_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "0")
    assert columns() == 80


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0], "▁"),
        ([3.0, 3.0], "▁▁"),
        ([8.0, 1.0], "█▁"),
        ([1.0, 4.5, 8.0], "▁▄█"),
        ([1e3, 1e2, 1e1, 1e0], "█▅▃▁"),  # logarithmic
        ([1.0, 3.0, 5.0, 7.0, 0.0, 0.0], "▃█▁"),  # means of two
    ],
)
def test_sparkline(values: list[float], expected: str) -> None:
    assert sparkline(values, 3 if len(values) > 4 else 48) == expected
