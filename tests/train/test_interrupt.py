"""Signals between steps, and failures in one line."""

import errno
import os
import signal
import threading

import pytest
import torch

from k3 import UserError
from k3.train.interrupt import one_line_failures, signals


def test_the_first_signal_waits_and_the_second_acts():
    said = []
    with pytest.raises(KeyboardInterrupt), signals(said.append) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        assert said == ["stopping after this step (once more to stop at once)"]
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with signals(lambda line: None) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_threads_have_no_signals():
    found = []

    def run():
        with signals(found.append) as stop:
            found.append(stop.signal)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [None]


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/metrics.jsonl"),
            "no space left for /x/m",
        ),
        (OSError(errno.EDQUOT, "Quota exceeded"), "no space left for the run"),
        (MemoryError(), "out of memory: lower data.tokens_per_micro_batch"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (ValueError("router scores of token 3 are not finite"), "router scores of token 3"),
        (UserError("lr must be positive"), "lr must be positive"),
    ],
)
def test_failures_that_a_user_can_mend_are_one_line(error, start):
    with pytest.raises(UserError) as caught, one_line_failures(lambda: "step 7 is safe"):
        raise error
    message = str(caught.value)
    assert message.startswith(start) and "\n" not in message
    assert isinstance(error, UserError) or message.endswith("step 7 is safe")


@pytest.mark.parametrize(
    "error", [OSError(errno.EPERM, "no"), RuntimeError("size mismatch"), ValueError("bad shape")]
)
def test_our_own_faults_keep_their_traceback(error):
    with pytest.raises(type(error)) as caught, one_line_failures(lambda: ""):
        raise error
    assert caught.value is error


def test_a_full_disk_while_metrics_are_written(corpus, tmp_path, monkeypatch):
    from tiny_run import tiny_run

    from k3.train.metrics import JsonLines
    from k3.train.pretrain import pretrain

    plain = JsonLines.write

    def write(self, row):
        if row["step"] == 3:
            raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
        plain(self, row)

    monkeypatch.setattr(JsonLines, "write", write)
    with pytest.raises(UserError, match=r"no space left for metrics.jsonl; .* after step 2$"):
        pretrain(tiny_run(corpus), tmp_path)
