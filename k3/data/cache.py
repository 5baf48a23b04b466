"""Folders that are whole or absent, however many processes build them and whenever one is
killed."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from k3 import UserError

T = TypeVar("T")


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/openk3`, or `~/.cache/openk3`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openk3"


def open_or_build(folder: Path, opener: Callable[[Path], T], writer: Callable[[Path], None]) -> T:
    """Opens `folder`; where it is absent or damaged, writes it beside its place and renames it.

    `opener` raises UserError on a folder that is not whole. `writer` fills an empty folder.
    UserError if the disk is full or the place may not be written.
    """
    if (found := _opened(folder, opener)) is not None:
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if (found := _opened(folder, opener)) is None:
                _publish(folder, writer)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from error
    return found if found is not None else opener(folder)


def _opened(folder: Path, opener: Callable[[Path], T]) -> T | None:
    if not folder.exists():
        return None
    try:
        return opener(folder)
    except UserError:
        return None


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One builder at a time on this machine. The kernel frees the lock when its holder dies."""
    with open(folder.with_name(f".{folder.name}.lock"), "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems have no locks: then both build, and the rename decides.
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        yield


def _publish(folder: Path, writer: Callable[[Path], None]) -> None:
    host = socket.gethostname()
    _remove_dead(folder, host)
    beside = folder.with_name(f".{folder.name}.{host}.{os.getpid()}.{secrets.token_hex(4)}")
    beside.mkdir()
    try:
        writer(beside)
        _sync(beside)
        if folder.exists():
            os.rename(folder, beside / "damaged")
            shutil.rmtree(beside / "damaged")
        os.rename(beside, folder)
        _sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _remove_dead(folder: Path, host: str) -> None:
    """Removes what killed builders on this machine left behind."""
    for leftover in folder.parent.glob(f".{folder.name}.{host}.*.*"):
        process = leftover.name.split(".")[-2]
        if process.isdigit() and not _alive(int(process)):
            shutil.rmtree(leftover, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
