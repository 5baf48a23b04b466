"""SIGINT and SIGTERM let the step finish, the second SIGINT doesn't; and failures that are one
line, not a traceback.
"""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from k3 import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


class Stop:
    """Set by a signal, read between steps."""

    def __init__(self) -> None:
        self.signal: int | None = None


@contextmanager
def signals(say: Callable[[str], None]) -> Iterator[Stop]:
    """Collects SIGINT and SIGTERM; a second one acts as it would without us. The old handlers come
    back.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        signal.signal(number, before[signal.Signals(number)])
        say("stopping after this step (once more to stop at once)")

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def one_line_failures(where: Callable[[], str]) -> Iterator[None]:
    """Turns a full disk, exhausted memory and scores that are not finite into a UserError.

    `where` says what was going on and what is safe.
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UserError(f"no space left for {error.filename or 'the run'}; {where()}") from error
    except MemoryError as error:
        raise UserError(_memory_line(where())) from error
    except RuntimeError as error:
        if not any(words in str(error).lower() for words in NO_MEMORY):
            raise
        raise UserError(_memory_line(where())) from error
    except ValueError as error:
        if "not finite" not in str(error):
            raise
        raise UserError(f"{error}; {where()}") from error


def _memory_line(where: str) -> str:
    return (
        "out of memory: lower data.tokens_per_micro_batch (and raise micro_batches), "
        f"or set remat=layer; {where}"
    )
