"""`generate` and `inspect logits` on a small checkpoint in the released layout."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k3 import cli
from k3.checkpoint.released import load_released, save_released
from k3.model.presets import preset
from k3.model.transformer import K3
from k3.ops.spans import Spans
from k3.text.tokenizer import Tokenizer

TEXT = "def add(x, y):\n    return x + y  # sum of é and 漢字\n"


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    return int(stop.value.code or 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([TEXT * 20], 512)
    # Byte pairs ran out before the vocabulary was full: the model takes what there is.
    model = K3(preset("nano", vocab_size=tokenizer.vocab_size))
    folder = tmp_path_factory.mktemp("run") / "hf"
    return save_released(model, folder, tokenizer=tokenizer, dtype="float32")


Out = Callable[..., str]


@pytest.fixture
def generated(checkpoint: Path, capsys: pytest.CaptureFixture) -> Out:
    def call(*words: str) -> str:
        assert run("generate", str(checkpoint), "--max-new-tokens", "12", *words) == 0
        return capsys.readouterr().out

    return call


def test_the_same_seed_gives_the_same_text(generated: Out):
    first = generated("--prompt", "def add", "--seed", "1")
    assert first.startswith("def add") and len(first) > len("def add\n")
    assert generated("--prompt", "def add", "--seed", "1") == first
    assert generated("--prompt", "def add", "--seed", "2") != first


def test_streamed_and_whole_text_agree(generated: Out):
    for words in (("--seed", "3"), ("--greedy",)):
        words = ("--prompt", "漢", *words)
        assert generated(*words, "--no-stream") == generated(*words)


def test_greedy_is_temperature_zero(generated: Out):
    assert generated("--prompt", "x", "--greedy") == generated(
        "--prompt", "x", "--temperature", "0"
    )
    assert generated("--prompt", "x", "--greedy") == generated("--prompt", "x", "--top-k", "1")


def test_logits_are_those_of_the_model(checkpoint: Path, tmp_path: Path):
    out = tmp_path / "logits.safetensors"
    assert run("inspect", "logits", str(checkpoint), "--ids", "1,2,3", "--out", str(out)) == 0
    logits = load_file(out)["logits"]
    model = load_released(checkpoint)
    with torch.no_grad():
        h_TD = model(torch.tensor([1, 2, 3]), Spans.from_lengths([3])).h_TD
        expected = model.logits(h_TD)
    assert logits.dtype == torch.float32 and torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("generate", "{}", "--prompt", ""), "the prompt is empty"),
        (("generate", "/no/such", "--prompt", "x"), "/no/such"),
        (("inspect", "logits", "{}", "--ids", "1,x", "--out", "f"), "got '1,x'"),
        (("inspect", "logits", "{}", "--ids", "99999", "--out", "f"), "99999"),
        (("inspect", "logits", "{}", "--ids", "", "--out", "f"), "at least one id"),
    ],
)
def test_a_mistake_is_one_line(
    checkpoint: Path, words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture
):
    assert run(*(word.format(checkpoint) for word in words)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and complaint in err and err.count("\n") == 1
