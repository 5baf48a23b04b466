"""The rooms of the house: who may import whom, no folder inside a room, no oversized file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent / "k3"

MAY_IMPORT: dict[str, str] = {
    "text": "",
    "ops": "",
    "sandbox": "",
    "report": "",
    "model": "ops",
    "optim": "ops",
    "data": "text ops",
    "env": "text sandbox report",
    "checkpoint": "ops model optim",
    "parallel": "ops model optim",
    "tasks": "text env sandbox",
    "train": "text data ops model optim checkpoint parallel report",
    "serve": "text ops model checkpoint parallel report",
    "rl": "text data env ops model optim checkpoint parallel train report",
    "eval": "text data env tasks ops model checkpoint report",
    "study": "train eval data model optim ops report",
    "recipes": "text ops sandbox report model optim data env checkpoint parallel tasks train serve "
    "rl eval study",
}
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc"}
FREE = {"cli", "__main__"}
LINES, TRITON_LINES = 600, 1200


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Every dotted name imported: in functions, under TYPE_CHECKING and by `import_module` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def complaints(house: Path) -> list[str]:
    """One line for every broken rule under `house`, the folder of the package `k3`."""
    found = []
    for path in sorted(house.rglob("*.py")):
        place = path.relative_to(house)
        room = place.parts[0] if len(place.parts) > 1 else place.stem
        found += shape_complaints(place, room, len(path.read_text().splitlines()))
        package = ".".join(["k3", *place.parts[:-1]])
        allowed = {*MAY_IMPORT.get(room, "").split(), room}
        for name in imported(ast.parse(path.read_text()), package):
            parts = name.split(".")
            if parts[0] != "k3" or len(parts) < 2:
                continue
            target = parts[1]
            ours = target in MAY_IMPORT or target in FREE
            if not ours and not (house / target).exists():
                continue  # a name of k3/__init__.py: UserError, __version__
            if room not in FREE and target not in allowed:
                found.append(f"{place}: {room} may not import {target} ({name})")
    return found


def shape_complaints(place: Path, room: str, lines: int) -> list[str]:
    found = []
    limit = TRITON_LINES if place.stem.endswith("_triton") else LINES
    if lines > limit:
        found.append(f"{place}: {lines} lines, at most {limit}")
    if len(place.parts) > 2:
        found.append(f"{place}: a folder inside a room")
    if room not in MAY_IMPORT and room not in FREE and place.name != "__init__.py":
        found.append(f"{place}: room {room} is not declared")
    if place.stem in VAGUE:
        found.append(f"{place}: {place.stem} is not an idea")
    return found


def test_the_house_stands():
    assert complaints(HOUSE) == []


def house_with(folder: Path, place: str, text: str) -> Path:
    path = folder / "k3" / place
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return folder / "k3"


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("ops/kda.py", "from k3.model import config"),
        ("ops/kda.py", "import k3.model.config"),
        ("ops/kda.py", "from k3 import model"),
        ("ops/kda.py", "from ..model.config import K3Config"),
        ("ops/kda.py", "from .. import model"),
        ("report/page.py", "def late():\n    from k3.text.tokenizer import Tokenizer"),
        (
            "model/kda.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import k3.optim",
        ),
        ("optim/muon.py", "import importlib\nimportlib.import_module('k3.model.kda')"),
        ("train/loop.py", "from k3.recipes.pretrain import nano"),
        ("recipes/demo.py", "from k3 import cli"),
        ("attic/box.py", "x = 1"),
        ("ops/deep/kda.py", "x = 1"),
        ("ops/utils.py", "x = 1"),
        ("ops/long.py", "x = 1\n" * (LINES + 1)),
        ("ops/long_triton.py", "x = 1\n" * (TRITON_LINES + 1)),
    ],
)
def test_a_crack_is_seen(tmp_path: Path, place: str, text: str):
    assert len(complaints(house_with(tmp_path, place, text))) == 1


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("ops/kda.py", "from k3 import UserError, __version__\nfrom k3.ops.spans import Spans"),
        ("ops/kda.py", "from .spans import Spans\nfrom . import facts\nimport torch"),
        ("ops/kda_triton.py", "x = 1\n" * (LINES + 1)),
        ("model/kda.py", "from k3.ops import kda"),
        ("recipes/demo.py", "def late():\n    from k3.train.pretrain import pretrain"),
    ],
)
def test_a_sound_wall_is_left_alone(tmp_path: Path, place: str, text: str):
    assert complaints(house_with(tmp_path, place, text)) == []
