"""Every kind of source, and the mistakes a user makes with it."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from k3 import UserError
from k3.data.sources import (
    DEFAULT_PACKAGES,
    default_documents,
    list_documents,
    pinned_versions,
)


def read_all(source: Path | str) -> dict[str, bytes]:
    return {entry.path: entry.read() for entry in list_documents(str(source))}


def test_folder_lists_files_by_relative_name(tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.py").write_bytes(b"x = 1\n")
    (tmp_path / "top.md").write_bytes(b"top")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    (tmp_path / "link.md").symlink_to(tmp_path / "top.md")
    assert read_all(tmp_path) == {"a/b/x.py": b"x = 1\n", "top.md": b"top"}


def test_a_text_file_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path: Path):
    path = tmp_path / "book.txt"
    paragraphs = [f"paragraph {i} " + "word " * 40 for i in range(400)]
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    found = read_all(path)
    assert list(found) == sorted(found) and len(found) > 3
    assert b"".join(found.values()) == path.read_bytes()
    assert all(16_000 < len(piece) < 17_000 for piece in list(found.values())[:-1])
    assert all(piece.startswith(b"paragraph") for piece in found.values())


def test_jsonl_reads_any_row_and_names_bad_ones(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"text": "one é"},
        {"text": "two", "path": "docs/two"},
        {"text": "2b", "path": "docs/two"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    assert read_all(path) == {
        "rows.jsonl:000000001": "one é".encode(),
        "docs/two": b"two",
        "docs/two#rows.jsonl:000000003": b"2b",
    }
    for line, message in (
        ("{", "line 2 is not JSON"),
        ('{"txt": 1}', "line 2 has no string field"),
    ):
        path.write_text('{"text": "a"}\n' + line + "\n")
        with pytest.raises(UserError, match=f"rows.jsonl: {message}"):
            list_documents(str(path))


def test_parquet_column_text(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", None, "three"], "other": [1, 2, 3]}), path)
    assert read_all(path) == {"rows.parquet:000000000": b"one", "rows.parquet:000000002": b"three"}
    parquet.write_table(pyarrow.table({"body": ["one"]}), path)
    with pytest.raises(UserError, match="rows.parquet: no readable column 'text'") as caught:
        list_documents(str(path))
    assert "\n" not in str(caught.value)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match="rows.parquet: no readable column 'text'"):
        list_documents(str(path))


def test_parquet_without_pyarrow_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(UserError, match="needs pyarrow, which is not installed"):
        list_documents(str(path))


def test_a_source_that_is_nothing():
    with pytest.raises(UserError, match="data source 'no/such' is no file or folder"):
        list_documents("no/such")


def test_site_packages_is_python_only():
    names = [entry.path for entry in list_documents("site-packages")]
    assert "pytest/__init__.py" in names
    assert all(name.endswith(".py") for name in names)


def test_the_default_corpus_is_of_pinned_core_packages():
    pins = pinned_versions()
    assert set(DEFAULT_PACKAGES) <= set(pins)
    assert pins["torch"] == "2.13.0"
    plots_and_dev = {"matplotlib", "fonttools", "pytest", "mypy"}
    assert plots_and_dev <= set(pins) and not plots_and_dev & set(DEFAULT_PACKAGES)


def test_default_documents_are_the_same_everywhere(tmp_path: Path):
    pins = {"pluggy": importlib.metadata.version("pluggy")}
    found = {entry.path: entry.read() for entry in default_documents(("pluggy",), pins)}
    assert "pluggy/_hooks.py" in found and all(name.endswith(".py") for name in found)
    pins["torch"] = importlib.metadata.version("torch").split("+")[0]
    names = {entry.path for entry in default_documents(("torch",), pins)}
    # torch/version.py is written by each build ("+cpu", the commit, the CUDA version).
    assert "torch/nn/functional.py" in names and "torch/version.py" not in names


def test_another_version_is_refused_with_both():
    found = importlib.metadata.version("pluggy")
    with pytest.raises(UserError, match=f"pluggy is {found}, k3/constraints.txt pins 0.0.1"):
        default_documents(("pluggy",), {"pluggy": "0.0.1"})
    with pytest.raises(UserError, match="no-such-package is not installed, .* pins 3"):
        default_documents(("no-such-package",), {"no-such-package": "3"})
