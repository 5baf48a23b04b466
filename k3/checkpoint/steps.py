"""Step folders: all that a run needs to go on as if it had never stopped.

    step_00000100/
        tensors.safetensors     the model's parameters and buffers, by name
        optimizer.safetensors   the optimizer's tensors, by name
        state.json              data cursor, random states, counters
        config.json             the resolved configuration of the run
        COMPLETE                size and SHA-256 of each file, date, commit; written last

A step is whole or absent. Whatever else is in the folder is ignored.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import k3
from k3 import UserError
from k3.checkpoint.folders import remove_folder, remove_leftovers, whole_folder
from k3.checkpoint.tensorfile import Written, entries, hash_file, write_bytes, write_tensors

COMPLETE = "COMPLETE"
TENSORS, OPTIMIZER = "tensors.safetensors", "optimizer.safetensors"
STATE, CONFIG = "state.json", "config.json"
FILES = (TENSORS, OPTIMIZER, STATE, CONFIG)
STEP_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class StepFolder:
    step: int
    tensors: dict[str, Tensor]
    """On the CPU, in the dtypes that were saved."""
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    config: dict[str, Any]
    made: dict[str, Any]
    """date (UTC), commit (None outside a checkout) and torch version of the writer."""


def save_step(
    folder: Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Writes `folder/step_{step:08d}`, whole or not at all, and returns it.

    Then all but the newest `keep` complete steps go; never the one just written. A name that shares
    its values with another (tied weights) is stored once. UserError, with the earlier steps
    untouched, if the disk is full or the folder cannot be written.
    """
    assert keep >= 1 and step >= 0, (keep, step)
    texts = {STATE: _json(state), CONFIG: _json(config)}
    place = folder / f"step_{step:08d}"
    remove_leftovers(folder, "step_")
    with whole_folder(place, "earlier steps are as they were") as temp:
        written = {
            TENSORS: _write(temp / TENSORS, tensors),
            OPTIMIZER: _write(temp / OPTIMIZER, optimizer),
        }
        written |= {name: write_bytes(temp / name, text) for name, text in texts.items()}
        record = {"step": step, **_made(), "files": {n: vars(w) for n, w in written.items()}}
        write_bytes(temp / COMPLETE, _json(record))
    _prune(folder, place, keep)
    return place


def latest_step(folder: Path) -> Path | None:
    """The complete step with the highest number under `folder`, or None."""
    complete = complete_steps(folder)
    return complete[-1] if complete else None


def complete_steps(folder: Path) -> list[Path]:
    """The complete steps under `folder`, the oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if STEP_NAME.fullmatch(path.name)]
    return sorted((path for path in found if (path / COMPLETE).is_file()), key=_number)


def load_step(path: Path) -> StepFolder:
    """Reads a step folder after checking each file's size and hash.

    UserError names the file, with both sizes or hashes, if anything is missing or not as it was
    written.
    """
    record = _read_record(path)
    for name in FILES:
        _check_file(path / name, record["files"].get(name))
    return StepFolder(
        step=record["step"],
        tensors=_read_tensors(path / TENSORS),
        optimizer=_read_tensors(path / OPTIMIZER),
        state=json.loads((path / STATE).read_bytes()),
        config=json.loads((path / CONFIG).read_bytes()),
        made={key: record.get(key) for key in ("date", "commit", "torch")},
    )


def _prune(folder: Path, written: Path, keep: int) -> None:
    others = [path for path in complete_steps(folder) if path != written]
    for path in others[: len(others) - (keep - 1)]:
        remove_folder(path)


def _number(path: Path) -> int:
    match = STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _write(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    kept, aliases = _without_aliases(tensors)
    return write_tensors(path, entries(kept), {"aliases": json.dumps(aliases)})


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each value once, and for the other names of one the name it is kept under."""
    seen: dict[Any, str] = {}
    kept, aliases = {}, {}
    for name, t in tensors.items():
        key = (t.device, t.data_ptr(), t.dtype, t.shape, t.stride()) if t.numel() else name
        first = seen.setdefault(key, name)
        if first == name:
            kept[name] = t
        else:
            aliases[name] = first
    return kept, aliases


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
    except SafetensorError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    return tensors | {name: tensors[first] for name, first in aliases.items()}


def _read_record(path: Path) -> dict[str, Any]:
    file = path / COMPLETE
    try:
        record = json.loads(file.read_bytes())
        files, step = record["files"], record["step"]
    except FileNotFoundError:
        raise UserError(f"{path}: no {COMPLETE}, so this is not a finished step folder") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: cannot be read ({error!r})") from None
    if step != _number(path):
        raise UserError(f"{file}: says step {step}, the folder is named {path.name}")
    if not isinstance(files, dict):
        raise UserError(f"{file}: files must be an object, got {files!r}")
    return dict(record)


def _check_file(path: Path, expected: dict[str, Any] | None) -> None:
    if not expected:
        raise UserError(f"{path.parent / COMPLETE}: has no entry for {path.name}")
    if not path.is_file():
        raise UserError(f"{path}: missing, {expected['bytes']} bytes were written")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise UserError(f"{path}: {size} bytes, {expected['bytes']} were written")
    found = hash_file(path).sha256
    if found != expected["sha256"]:
        raise UserError(f"{path}: changed, SHA-256 is {found}, {expected['sha256']} was written")


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _made() -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": now, "commit": _commit(), "torch": torch.__version__}


@lru_cache
def _commit() -> str | None:
    """HEAD of the checkout that this package's files are tracked in, `+` when they were changed."""
    here = Path(k3.__file__).parent
    if _git(here, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(here, "rev-parse", "HEAD")
    changed = _git(here, "status", "--porcelain", "--untracked-files=no", ".")
    return head and head.strip() + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
