"""Ids, control ids, the saved folder and other libraries' reading of it."""

from __future__ import annotations

import base64
import functools
import json
import sysconfig
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from k3 import UserError
from k3.text.control import CONTROL_NAMES, NUM_CONTROL, control_id
from k3.text.tokenizer import MAX_RUN_CHARS, MAX_TEXT_CHARS, Tokenizer, byte_alphabet, pieces

VOCAB = 1024
MIXED = (
    "Don't 中文English混合 1234567  x_y(\t\n\n) ÀÉ 'tis WE'LL\r\n"
    "\U0001fae0 e\u0301 日本語テスト ²½ Ω"
)


@functools.cache
def stdlib_texts() -> tuple[str, ...]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse.py", "ast.py", "copy.py", "csv.py", "enum.py", "heapq.py", "json/decoder.py")
    return tuple((folder / name).read_text(encoding="utf-8") for name in names) + (MIXED * 50,)


@functools.cache
def trained() -> Tokenizer:
    return Tokenizer.train(stdlib_texts(), VOCAB)


@functools.cache
def fast() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(trained()._fast().to_str())


def test_sizes_and_control_ids_of_the_released_vocabulary():
    assert control_id(163_840, "[BOS]") == 163_584
    assert control_id(163_840, "<|end_of_msg|>") == 163_586
    assert control_id(163_840, "<|sep|>") == 163_589
    assert control_id(163_840, "<|media_pad|>") == 163_605
    assert control_id(163_840, "[PAD]") == 163_839
    tokenizer = trained()
    assert tokenizer.vocab_size == VOCAB
    released = {"[BOS]": 256, "[EOS]": 255, "<|end_of_msg|>": 254, "<|open|>": 253, "[UNK]": 2}
    for name, from_end in released.items():
        assert tokenizer.encode_control(name) == VOCAB - from_end
    # Closing the gap at slot 8 (as some converters do) would move every id after it.
    assert tokenizer.encode_control("[EOT]") == VOCAB - 256 + 9
    assert tokenizer.encode_control("<|reserved_8|>") == VOCAB - 256 + 8
    assert len(set(CONTROL_NAMES)) == NUM_CONTROL


def test_single_bytes_come_first_in_the_published_order():
    tokenizer = trained()
    assert tokenizer.encode("!") == [0]
    assert [tokenizer.token_bytes(token) for token in (0, 11, 188)] == [b"!", b",", b"\x00"]
    assert sorted(tokenizer.token_bytes(token)[0] for token in range(256)) == list(range(256))
    assert len(set(byte_alphabet())) == 256


def test_splits_are_those_of_the_release():
    split = [text for text, _ in fast().pre_tokenizer.pre_tokenize_str("北京市 Pascal")]
    assert split[1:] == ["ĠPascal"]  # the Han run stands alone, its space goes with the word
    for text, whole in (("中文English", False), ("1234", False), ("123", True), ("don't", True)):
        assert (len(fast().pre_tokenizer.pre_tokenize_str(text)) == 1) is whole, text


def test_training_ignores_order_and_repeats_exactly():
    again = Tokenizer.train(reversed(stdlib_texts()), VOCAB)
    assert again.fingerprint == trained().fingerprint
    assert Tokenizer.train(stdlib_texts()[:3], VOCAB).fingerprint != trained().fingerprint


def test_both_libraries_agree_on_text():
    for text in stdlib_texts():
        ids = trained().encode(text)
        assert fast().encode(text).ids == ids
        assert trained().decode(ids) == text
        assert text.startswith(MIXED) or len(ids) < len(text.encode()) / 2


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("aA1 'st.\n\r\t_é中²½\u0301\U0001fae0"), max_size=60))
def test_both_libraries_agree_on_awkward_strings(text: str):
    ids = trained().encode(text)
    assert fast().encode(text).ids == ids
    assert trained().decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_comes_back(text: str):
    assert trained().decode(trained().encode(text)) == text


@pytest.mark.parametrize("name", CONTROL_NAMES[:6] + ("[PAD]", "<|media_pad|>", "<|reserved_8|>"))
def test_control_names_in_text_are_ordinary_bytes(name: str):
    ids = trained().encode(f"x{name}y")
    assert max(ids) < VOCAB - NUM_CONTROL
    assert trained().decode(ids) == f"x{name}y"
    # The other library does parse it: what would be wrong.
    assert fast().encode(f"x{name}y").ids != ids


def test_unknown_control_name_and_ids_outside():
    with pytest.raises(
        UserError, match="no control token is named '<|think|>'".replace("|", r"\|")
    ):
        trained().encode_control("<|think|>")
    for token in (-1, VOCAB):
        with pytest.raises(
            UserError, match=f"token id {token} is outside the vocabulary of {VOCAB}"
        ):
            trained().decode([token])


@pytest.mark.parametrize("run", [MAX_RUN_CHARS, MAX_RUN_CHARS + 1, 3 * MAX_RUN_CHARS])
@pytest.mark.parametrize("char", [" ", "a", "中"])
def test_long_runs_are_cut(run: int, char: str):
    text = "ab  " + char * run + "\n."
    cut = list(pieces(text))
    assert "".join(cut) == text
    # A wrong guard that counts 25,000 characters of any class would cut elsewhere.
    longest = max(len(piece.strip("ab \n.") if char == "中" else piece) for piece in cut)
    assert longest <= MAX_RUN_CHARS + 6
    assert (len(cut) > 1) == (run + (2 if char == " " else 0) > MAX_RUN_CHARS)


def test_long_texts_are_cut_and_encode_alike_in_a_batch():
    text = "word " * (MAX_TEXT_CHARS // 5) + "more words"
    assert [len(piece) for piece in pieces(text)] == [MAX_TEXT_CHARS, 10]
    assert list(pieces("")) == []
    batch = [text, "", "x", "y" * (MAX_RUN_CHARS + 1)]
    assert trained().encode_batch(batch, threads=2) == [trained().encode(text) for text in batch]


def test_lone_surrogate_becomes_a_replacement():
    assert trained().decode(trained().encode("a\ud800b")) == "a\ufffdb"


def test_save_and_load(tmp_path: Path):
    trained().save(tmp_path)
    loaded = Tokenizer.load(tmp_path, vocab_size=VOCAB)
    assert loaded.fingerprint == trained().fingerprint
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    added = config["added_tokens_decoder"]
    assert len(added) == NUM_CONTROL and added[str(VOCAB - 254)]["content"] == "<|end_of_msg|>"
    assert config["eos_token"] == "<|end_of_msg|>" and config["bos_token"] == "[BOS]"
    assert [added[str(VOCAB - n)]["special"] for n in (254, 253, 252, 251, 1)] == [
        True, False, False, False, True
    ]  # fmt: skip
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert other.get_vocab_size() == VOCAB
    for name in CONTROL_NAMES:
        assert other.token_to_id(name) == loaded.encode_control(name)
    assert other.encode(stdlib_texts()[0]).ids == loaded.encode(stdlib_texts()[0])
    assert other.decode(loaded.encode(MIXED)) == MIXED


def test_a_released_folder_names_only_some_control_ids(tmp_path: Path):
    trained().save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"] = {
        token: entry
        for token, entry in config["added_tokens_decoder"].items()
        if "reserved" not in entry["content"]
    }
    path.write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).fingerprint == trained().fingerprint


def _lines(tmp_path: Path) -> list[str]:
    return (tmp_path / "tiktoken.model").read_text().splitlines()


def _swap(line: int, text: str):
    def change(lines: list[str]) -> list[str]:
        return [*lines[:line], text, *lines[line + 1 :]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_swap(300, "no*base64 300"), "line 301 is not 'base64 rank'"),
        (_swap(300, "YWJj"), "line 301 is not 'base64 rank'"),
        (_swap(300, "YWJj x"), "line 301 is not 'base64 rank'"),
        (lambda lines: lines[:300] + lines[301:], "rank 300 is missing"),
        (_swap(300, base64.b64encode(b"zqzq").decode() + " 299"), "rank 299 is given twice"),
        (lambda lines: [*lines, lines[5]], "has rank 5 and again rank 5"),
        (_swap(0, base64.b64encode(b"zqzq").decode() + " 0"), "1 of the 256 single bytes"),
    ],
)
def test_corrupt_ranks_are_named(tmp_path: Path, change, message: str):
    trained().save(tmp_path)
    (tmp_path / "tiktoken.model").write_text("\n".join(change(_lines(tmp_path))) + "\n")
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert "tiktoken.model" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("added_tokens_decoder"), "added_tokens_decoder is not readable"),
        (lambda c: c.update(added_tokens_decoder={"3": {"content": "[BOS]"}}), "has id 3"),
        (
            # The public fault: gaps compacted, so that ids shift.
            lambda c: c.update(added_tokens_decoder={str(VOCAB - 248): {"content": "[EOT]"}}),
            f"'\\[EOT\\]' has id {VOCAB - 248}, expected {VOCAB - 247}",
        ),
    ],
)
def test_corrupt_config_is_named(tmp_path: Path, change, message: str):
    trained().save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        Tokenizer.load(tmp_path)


def test_other_user_mistakes(tmp_path: Path):
    with pytest.raises(UserError, match="tiktoken.model: cannot be read"):
        Tokenizer.load(tmp_path)
    trained().save(tmp_path)
    with pytest.raises(UserError, match=f"make {VOCAB} ids, the model's vocab_size is 2048"):
        Tokenizer.load(tmp_path, vocab_size=2048)
    with pytest.raises(UserError, match="at least 512 .* got 300"):
        Tokenizer.train(["text"], 300)
    with pytest.raises(UserError, match="vocab_size 2048 needs 1792 ranks, the text yields 2"):
        Tokenizer.train(["small text"], 2048)
