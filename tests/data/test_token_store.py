"""Token stores are whole or absent: killed builders, two at once, damage, a full disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from k3 import UserError
from k3.data.cache import default_cache, open_or_build
from k3.data.tokens import TokenStore, token_store
from k3.text.tokenizer import Tokenizer, byte_alphabet

ORDER = sorted(range(256), key=lambda byte: byte_alphabet()[byte])
BYTES = Tokenizer({bytes([byte]): rank for rank, byte in enumerate(ORDER)})
END = BYTES.encode_control("[EOS]")
TEXTS = ["one é", "", "three <|sep|>"]

BUILDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import k3.data.tokens
from test_token_store import BYTES
from k3.data.tokens import token_store
k3.data.tokens._GROUP_BYTES = 1
folder, delay = Path(sys.argv[1]), float(sys.argv[2])
def texts():
    for i in range(40):
        yield f"document {{i}} " * 50
        print(i, flush=True)
        time.sleep(delay)
store = token_store(folder, "corpus", texts, BYTES)
print("built", store.num_tokens, flush=True)
"""


def start_builder(folder: Path, delay: float) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            BUILDER.format(tests=str(Path(__file__).parent)),
            str(folder),
            str(delay),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def build(folder: Path, texts=TEXTS, corpus: str = "corpus") -> TokenStore:
    return token_store(folder, corpus, lambda: iter(texts), BYTES)


def never():
    raise AssertionError("an intact store was built again")
    yield


def test_documents_end_with_eos_and_know_their_bytes(tmp_path: Path):
    store = build(tmp_path / "store")
    assert store.num_documents == 3 and store.num_tokens == len(store.tokens)
    for i, text in enumerate(TEXTS):
        ids = store.tokens[store.offsets[i] : store.offsets[i + 1]].tolist()
        assert ids == [*BYTES.encode(text), END]
    assert store.byte_lengths.tolist() == [len(text.encode()) for text in TEXTS] == [6, 0, 13]
    assert store.tokens.dtype == np.uint16 and store.lengths.tolist() == [7, 1, 14]
    assert token_store(tmp_path / "store", "corpus", never, BYTES).meta == store.meta


def test_large_vocabularies_take_four_bytes(tmp_path: Path):
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {b"%06d" % i: 256 + i for i in range(66_000)}
    store = token_store(tmp_path / "s", "c", lambda: ["065999x"], Tokenizer(ranks))
    assert store.tokens.dtype == np.uint32
    assert store.tokens.max() == len(ranks) + 1 > 1 << 16


def test_grouping_and_threads_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = build(tmp_path / "a")
    monkeypatch.setattr("k3.data.tokens._GROUP_BYTES", 1)
    split = token_store(tmp_path / "b", "corpus", lambda: TEXTS, BYTES, threads=2)
    assert split.meta == whole.meta  # sizes and checksums


def test_a_killed_builder_leaves_nothing_that_looks_usable(tmp_path: Path):
    folder = tmp_path / "store"
    builder = start_builder(folder, 0.05)
    assert builder.stdout is not None
    for line in builder.stdout:
        if line.strip() == "5":
            break
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    assert not folder.exists()
    left = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(left) == 1 and left[0].name.startswith(".store.")
    with pytest.raises(UserError, match="meta.json: cannot be read"):
        TokenStore.open(left[0])
    # The next builder is not held up by the dead one's lock, and clears its remains.
    assert build(folder).num_documents == 3
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["store"]


def test_two_builders_at_once_agree(tmp_path: Path):
    folder = tmp_path / "deep" / "store"
    builders = [start_builder(folder, 0.01) for _ in range(2)]
    outputs = [builder.communicate(timeout=60)[0].splitlines() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1] and outputs[0][-1].startswith("built ")
    # One waited for the other instead of doing the work again.
    assert sorted(len(lines) for lines in outputs) == [1, 41]
    assert TokenStore.open(folder).num_documents == 40
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["store"]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("tokens.bin", lambda data: data[:-2], "tokens.bin: size is 42, its description says 44"),
        ("tokens.bin", lambda data: b"\1" + data[1:], "tokens.bin: crc32 is"),
        ("index.bin", lambda data: data[:-1] + b"\1", "index.bin: crc32 is"),
        ("index.bin", None, "index.bin: cannot be read"),
        ("meta.json", lambda data: data[:40], "meta.json: is not a token store's description"),
        ("meta.json", lambda data: b"[]", "meta.json: is not a token store's description"),
        ("meta.json", lambda data: b'{"format": 0}', "meta.json: format 0, this version reads 1"),
    ],
)
def test_damage_is_named_and_mended(tmp_path: Path, name: str, damage, message: str):
    folder = tmp_path / "store"
    meta = dict(build(folder).meta)
    path = folder / name
    path.unlink() if damage is None else path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message) as caught:
        TokenStore.open(folder)
    assert "\n" not in str(caught.value)
    assert build(folder).meta == meta
    assert TokenStore.open(folder).num_documents == 3


def test_a_store_of_other_text_is_not_taken_for_this(tmp_path: Path):
    build(tmp_path / "store")
    other = build(tmp_path / "store", ["other"], corpus="other")
    assert other.meta["corpus"] == "other" and other.num_documents == 1


def test_a_full_disk_leaves_nothing(tmp_path: Path):
    def writer(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match="store: cannot be written .No space left on device."):
        open_or_build(tmp_path / "store", TokenStore.open, writer)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/store: cannot be written"):
        build(tmp_path / "file" / "store")


def test_a_living_builders_folder_is_left_alone(tmp_path: Path):
    import socket

    mine = tmp_path / f".store.{socket.gethostname()}.{os.getpid()}.abcd"
    other = tmp_path / ".store.another-host.1.abcd"
    mine.mkdir()
    other.mkdir()
    build(tmp_path / "store")
    assert mine.exists() and other.exists()


def test_the_cache_is_where_the_system_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "openk3"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "openk3"


def test_progress_reaches_its_total(tmp_path: Path):
    told = []
    texts = ["abc", "defg"]
    token_store(
        tmp_path / "s", "c", lambda: texts, BYTES, total_bytes=7, progress=lambda *a: told.append(a)
    )
    assert told == [("tokenise", 3, 7), ("tokenise", 7, 7)]
