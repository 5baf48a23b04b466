"""The command line's edge: one line and exit 2 for what a user can put right."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3 import UserError, __version__, cli


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    return int(stop.value.code or 0)


def commands(app: object = cli.app, *path: str) -> Iterator[tuple[str, ...]]:
    """Every command as the words that call it."""
    for command in app.registered_commands:
        yield (*path, command.name or command.callback.__name__.replace("_", "-"))
    for group in app.registered_groups:
        yield from commands(group.typer_instance, *path, group.name)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_teaches(words: tuple[str, ...], capsys: pytest.CaptureFixture):
    assert run(*words, "--help") == 0
    text = capsys.readouterr().out
    assert "Usage" in text
    assert words[-1] in ("doctor",) or f"k3 {' '.join(words)}" in text.split("Examples")[1]


def test_version(capsys: pytest.CaptureFixture):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"k3 {__version__}\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("nonsense",), "No such command 'nonsense'"),
        (("train",), "Missing argument"),
        (("train", "nano", "--steps", "many"), "--steps"),
        (("report", "/no/such/run"), "/no/such/run: no such run folder"),
        (("claims", "--docs", "/no/such/docs"), "no folder /no/such/docs"),
        (("inspect", "config", "huge"), "huge: no such preset, config.json or checkpoint"),
        (("inspect", "config", "nano", "--set", "moe.top=2"), "did you mean top_k"),
        (("inspect", "config", "nano", "--set", "moe.top_k=99"), "99 of 16"),
    ],
)
def test_a_mistake_is_one_line(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture
):
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and complaint in captured.err
    assert captured.err.count("\n") == 1


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (UserError("a.json: two\n lines"), "error: a.json: two lines", 2),
        (OSError(errno.ENOSPC, "No space left on device", "x.bin"), "error: no space left", 2),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "error: permission denied: x", 2),
        (MemoryError(), "error: out of memory", 2),
        (OutOfMemoryError("CUDA out of memory"), "error: out of memory", 2),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "error: out of memory", 2),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
)
def test_what_ends_a_command(
    error: BaseException,
    line: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("k3.report.claims.render", broken)
    assert run("claims", "--docs", str(Path(__file__).parent)) == code
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("bad shape"), OSError(errno.EIO, "I/O"), KeyError(1)])
def test_a_fault_of_ours_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr("k3.report.claims.render", broken)
    with pytest.raises(type(error)):
        cli.main(["claims", "--docs", str(Path(__file__).parent)])


def test_config_round_trips_through_a_file(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert run("inspect", "config", "nano", "--set", "moe.top_k=2") == 0
    text = capsys.readouterr().out
    (tmp_path / "config.json").write_text(text)
    assert run("inspect", "config", str(tmp_path)) == 0
    assert capsys.readouterr().out == text
    assert run("inspect", "config", "nano") == 0
    assert json.loads(capsys.readouterr().out) != json.loads(text)


def test_a_broken_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "config.json").write_text('{"text_config": ')
    assert run("inspect", "config", str(tmp_path)) == 2
    assert f"{tmp_path}/config.json: not JSON" in capsys.readouterr().err


def test_the_released_shape_is_counted(capsys: pytest.CaptureFixture):
    assert run("inspect", "params", "kimi-k3") == 0
    text = capsys.readouterr().out
    assert "2,779,484,476,000" in text and "104,189,612,640" in text
    assert max(map(len, text.split("\n"))) <= 100


def test_the_released_layout_is_listed(capsys: pytest.CaptureFixture):
    assert run("inspect", "layout", "kimi-k3") == 0
    lines = capsys.readouterr().out.split("\n")
    assert "1,560,860,324,864 bytes" in "".join(lines) and max(map(len, lines)) <= 100
    assert lines.index("") - 3 == 60
    assert run("inspect", "layout", "kimi-k3", "--experts", "bf16") == 0
    assert "1,560,860,324,864" not in capsys.readouterr().out
    assert run("inspect", "layout", "nano", "--experts", "fp4") == 2


def test_fresh_only_clears_a_run(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "thesis.txt").write_text("x")
    assert run("train", "nano", "--fresh", "--out", str(tmp_path)) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "steps" / "step_00000001").mkdir(parents=True)
    cli._clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
