"""Importing k3, and asking it for help, must load nothing heavy."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "transformers", "matplotlib", "tokenizers", "tiktoken", "pyarrow")


def loaded_by(statement: str) -> set[str]:
    """Which of the heavy modules are loaded once `statement` has run in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint('LOADED', *[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("LOADED")[2].split())


HELP = """
from k3.cli import main
try:
    main([{words}, "--help"])
except SystemExit as stop:
    assert not stop.code
"""


def help_of(*words: str) -> str:
    return HELP.format(words=", ".join(repr(word) for word in words) or "*[]")


def test_the_probe_sees_a_heavy_import():
    assert "numpy" in loaded_by("import numpy")


@pytest.mark.parametrize("statement", ["import k3", "import k3.report.page", "import k3.cli"])
def test_import_loads_nothing_heavy(statement: str):
    assert loaded_by(statement) == set()


@pytest.mark.parametrize("words", [(), ("train",), ("inspect", "params")])
def test_help_loads_nothing_heavy(words: tuple[str, ...]):
    assert loaded_by(help_of(*words)) == set()
