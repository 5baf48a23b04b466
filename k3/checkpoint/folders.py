"""A folder that is whole or absent: written beside its place under another name, synced, then moved
in with one rename.

A writer holds a lock on its temporary folder, so that what a killed writer left is told from what
another is writing, and is removed by the next one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3 import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
MARK = ".tmp-"
AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextmanager
def whole_folder(place: Path, unharmed: str) -> Iterator[Path]:
    """Gives a temporary folder that becomes `place`, taking the place of an older one, if the block
    ends well, and goes away otherwise.

    UserError, in one line that ends with `unharmed`, when the system refuses to write.
    """
    temp = place.parent / f".{place.name}{MARK}{secrets.token_hex(4)}"
    lock = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temp.mkdir()
        lock = _lock(temp)
        yield temp
        sync_folder(temp)
        _move_in(temp, place)
        sync_folder(place.parent)
    except OSError as error:
        raise UserError(_refusal(error, place, unharmed)) from error
    finally:
        # After an exchange the temporary name holds the folder that was replaced.
        shutil.rmtree(temp, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_folder(place: Path) -> None:
    """Takes the name away first, so that no reader finds half a folder."""
    temp = place.parent / f".{place.name}{MARK}{secrets.token_hex(4)}"
    place.rename(temp)
    shutil.rmtree(temp, ignore_errors=True)


def remove_leftovers(parent: Path, prefix: str = "") -> None:
    """Removes temporary folders under `parent` whose writer is gone."""
    for temp in parent.glob(f".{prefix}*{MARK}*"):
        lock = _lock(temp)
        if lock is not None:
            shutil.rmtree(temp, ignore_errors=True)
            os.close(lock)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` last through a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until closed; None if another process has it."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _move_in(temp: Path, place: Path) -> None:
    if place.is_dir() and any(place.iterdir()):
        if not _exchange(temp, place):
            # No atomic exchange on this file system: for an instant the place is empty.
            remove_folder(place)
            temp.rename(place)
    else:
        temp.rename(place)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step, where the system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    return bool(rename(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) == 0)


def _refusal(error: OSError, place: Path, unharmed: str) -> str:
    what = error.filename or place
    if error.errno in FULL:
        parent = place.parent
        free = f" ({shutil.disk_usage(parent).free:,} bytes free)" if parent.exists() else ""
        return f"{what}: no space left{free}; {unharmed}"
    return f"{what}: cannot be written ({error.strerror}); {unharmed}"
