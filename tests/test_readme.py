"""Every command in the README and the docs exists as it is written, and the cheap ones run."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from k3 import cli
from k3.recipes.demo import NEXT
from k3.recipes.pretrain import ARMS, RECIPES, recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CHEAP = ("doctor", "inspect params", "inspect layout", "inspect config")


def lines_of(page: Path) -> Iterator[str]:
    """Command lines in fenced blocks that are shell or have no language."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S):
        if language in ("", "bash", "sh"):
            yield from (line.strip() for line in block.splitlines())


def k3_words(line: str) -> list[str] | None:
    """The words after k3, where the line calls it in any of its ways."""
    match = re.match(r"(?:\S*bin/k3|k3|(?:torchrun [^k]*|python3? )-m k3)\s+(.*)", line)
    return shlex.split(match[1], comments=True) if match else None


COMMANDS = [
    (page.name, line) for page in PAGES for line in lines_of(page) if k3_words(line) is not None
] + [("the demo", line.format(out="runs/demo").split("   ")[0]) for line in NEXT]
TARGETS = [(page.name, line) for page in PAGES for line in lines_of(page) if line[:5] == "make "]


def parse(words: list[str]) -> tuple[str, dict]:
    """The command's name and parameters as typer reads them; raises on what it would refuse."""
    group = typer.main.get_command(cli.app)
    context = group.make_context("k3", list(words))
    name, command, rest = group.resolve_command(context, words)
    while hasattr(command, "commands"):
        context = command.make_context(name, list(rest), parent=context)
        inner, command, rest = command.resolve_command(context, rest)
        name = f"{name} {inner}"
    return name, command.make_context(name, list(rest), parent=context).params


def test_there_is_something_to_check():
    assert len(COMMANDS) > 15 and len(TARGETS) > 3
    assert k3_words("torchrun --nproc-per-node 4 -m k3 train mini") == ["train", "mini"]
    assert k3_words(".venv/bin/k3 demo  # all") == ["demo"] and k3_words("ls k3 demo") is None


@pytest.mark.parametrize("line", ["k3 nonsense", "k3 train", "k3 demo --wings", "k3 train nano x"])
def test_a_wrong_command_is_seen(line: str):
    with pytest.raises(Exception, match=r"(?i)no such|missing|unexpected"):
        parse(k3_words(line) or [])


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_is_one(page: str, line: str):
    name, params = parse(k3_words(line) or [])
    if name == "train":
        assert params["recipe"] in RECIPES
        assert set(params["arm"] or ()) <= set(ARMS)
        from k3.recipes.overrides import override

        override(recipe(params["recipe"], params["arm"] or ()), params["settings"] or ())


@pytest.mark.parametrize(
    "line",
    sorted({line for _, line in COMMANDS if " ".join(k3_words(line) or []).startswith(CHEAP)}),
)
def test_a_cheap_command_runs(line: str, capsys: pytest.CaptureFixture):
    if "runs/" in line:
        pytest.skip("needs a run")
    with pytest.raises(SystemExit) as stop:
        cli.main(k3_words(line))
    assert not stop.value.code and capsys.readouterr().out


@pytest.mark.parametrize(("page", "line"), TARGETS)
def test_a_target_is_in_the_makefile(page: str, line: str):
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{line.split()[1]}:", makefile, re.M), f"{page}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path):
    for name in re.findall(r"`((?:k3|tests|bench|examples|docs)/[\w/.]+\.\w+)`", page.read_text()):
        assert "NAME" in name or (ROOT / name).exists(), f"{page.name}: {name}"


def python_blocks() -> list[tuple[str, str]]:
    return [
        (page.name, block)
        for page in PAGES
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
        if "import" in block
    ]


def test_the_model_example_runs():
    block = next(block for page, block in python_blocks() if page == "model.md")
    done = subprocess.run(
        [sys.executable, "-c", block + "\nprint(tuple(logits.shape))"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout == "(1, 2048)\n", done.stderr


@pytest.mark.parametrize(("page", "block"), python_blocks())
def test_examples_import_what_exists(page: str, block: str):
    imports = [line for line in block.splitlines() if re.match(r"(from|import) ", line)]
    exec("\n".join(imports), {})


def test_the_record_in_the_report_page_is_one(tmp_path: Path):
    from k3.report import claims

    text = (ROOT / "docs" / "report.md").read_text()
    (block,) = re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)
    (tmp_path / "qb").mkdir()
    (tmp_path / "qb" / "record.json").write_text(json.dumps(json.loads(block)))
    assert "qb-no-step-size" in claims.read_findings(tmp_path)
