"""Byte-level BPE in tiktoken form, with the split rules, guards and control ids of the released
tokenizer.

Kimi K3's `tiktoken.model` holds 163,584 ranks; ours hold vocab_size - 256. Ordinary text never
yields a control id: "<|end_of_msg|>" typed by a user is encoded as the bytes it is made of, and
control ids come from `encode_control` alone.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tiktoken

from k3 import UserError
from k3.text.control import BOS, CONTROL_NAMES, END_OF_MSG, NOT_SPECIAL, NUM_CONTROL, PAD, UNK

NUM_BYTES = 256
MAX_TEXT_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Where text may not be joined: runs of Han first, then words, numbers of up to three digits,
punctuation, white space.
"""

_LONG_RUN = re.compile(rf"\s{{{MAX_RUN_CHARS + 1},}}|\S{{{MAX_RUN_CHARS + 1},}}")


def byte_alphabet() -> str:
    """The 256 printable characters that stand for bytes in byte-level BPE: character i stands for
    byte i.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(spare)) for byte in range(NUM_BYTES))


def pieces(text: str) -> Iterator[str]:
    """Cuts `text` every 400,000 characters and every 25,000 of one run of white space or of
    anything else.

    The splitting regex is superlinear on such runs; the release cuts them in the same places.
    """
    for start in range(0, len(text), MAX_TEXT_CHARS):
        chunk = text[start : start + MAX_TEXT_CHARS]
        done = 0
        for run in _LONG_RUN.finditer(chunk):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield chunk[done:cut]
                done = cut
        yield chunk[done:]


class Tokenizer:
    """Text to ids and back. `ranks` maps the bytes of each ordinary token to its id, 0 ..
    vocab_size - 257.
    """

    def __init__(
        self, ranks: dict[bytes, int], control_names: Sequence[str] = CONTROL_NAMES
    ) -> None:
        self._ranks = ranks
        self.vocab_size = len(ranks) + NUM_CONTROL
        self.control_names = tuple(control_names)
        assert len(set(self.control_names)) == NUM_CONTROL
        self._control = {name: len(ranks) + slot for slot, name in enumerate(self.control_names)}
        self._encoding = tiktoken.Encoding(
            name=f"k3-{self.vocab_size}",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self._control,
            explicit_n_vocab=self.vocab_size,
        )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learns vocab_size - 512 merges from `texts` (deterministic; the order of the texts does
        not matter).

        UserError if the vocabulary cannot hold the bytes and control ids, or the texts have too few
        distinct pairs.
        """
        if vocab_size < NUM_BYTES + NUM_CONTROL:
            raise UserError(
                f"vocab_size must be at least {NUM_BYTES + NUM_CONTROL} "
                f"({NUM_BYTES} bytes and {NUM_CONTROL} control ids), got {vocab_size}"
            )
        ranks = _learn(texts, vocab_size - NUM_CONTROL)
        if len(ranks) != vocab_size - NUM_CONTROL:
            raise UserError(
                f"the tokenizer's training text is too small: vocab_size {vocab_size} needs "
                f"{vocab_size - NUM_CONTROL} ranks, the text yields {len(ranks)}"
            )
        return cls(ranks)

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; never a control id, whatever the text says. A lone surrogate
        becomes U+FFFD.
        """
        ids: list[int] = []
        for piece in pieces(text):
            ids.extend(self._encoding.encode_ordinary(piece))
        return ids

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """`encode` for many texts, in threads that do not hold the interpreter's lock."""
        cut = [list(pieces(text)) for text in texts]
        flat = self._encoding.encode_ordinary_batch(
            [piece for group in cut for piece in group], num_threads=threads
        )
        parts = iter(flat)
        return [[token for _ in group for token in next(parts)] for group in cut]

    def encode_control(self, name: str) -> int:
        """The id of a control token, such as "[EOS]" or "<|open|>". UserError on a name that is
        none.
        """
        if name not in self._control:
            first = ", ".join(self.control_names[:6])
            raise UserError(f"no control token is named {name!r}; there are {first} and others")
        return self._control[name]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id; a control id gives its name. UserError if the id is outside the
        vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise UserError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        return self._encoding.decode_single_token_bytes(token)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD, as in `StreamDecoder`."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of everything that decides ids: ranks, split pattern, control names."""
        parts = (self._model_text(), SPLIT_PATTERN, "\n".join(self.control_names))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _model_text(self) -> str:
        in_order = sorted(self._ranks.items(), key=lambda item: item[1])
        return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in in_order)

    def save(self, folder: Path | str, model_max_length: int = 1_048_576) -> None:
        """Writes `tiktoken.model`, `tokenizer_config.json` and, for other libraries,
        `tokenizer.json`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tiktoken.model").write_text(self._model_text(), encoding="ascii")
        config = json.dumps(self._config(model_max_length), indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
        (folder / "tokenizer.json").write_text(self._fast().to_str(), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path | str, vocab_size: int | None = None) -> Tokenizer:
        """Reads a folder written by `save`, or a released one. UserError names the file and what is
        wrong with it.

        `vocab_size`, where the caller knows it from a model's config, must be the tokenizer's.
        """
        folder = Path(folder)
        ranks = read_ranks(folder / "tiktoken.model")
        if vocab_size is not None and vocab_size != len(ranks) + NUM_CONTROL:
            raise UserError(
                f"{folder / 'tiktoken.model'}: {len(ranks)} ranks and {NUM_CONTROL} control ids "
                f"make {len(ranks) + NUM_CONTROL} ids, the model's vocab_size is {vocab_size}"
            )
        return cls(ranks, _read_control_names(folder / "tokenizer_config.json", len(ranks)))

    def _config(self, model_max_length: int) -> dict[str, Any]:
        return {
            "added_tokens_decoder": {
                str(token): {
                    "content": name,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": name not in NOT_SPECIAL,
                }
                for name, token in self._control.items()
            },
            "bos_token": BOS,
            "clean_up_tokenization_spaces": False,
            "eos_token": END_OF_MSG,
            "model_max_length": model_max_length,
            "pad_token": PAD,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": UNK,
        }

    def _fast(self) -> Any:
        """The same tokenizer as a `tokenizers.Tokenizer` (which, unlike ours, parses control names
        in text).
        """
        from tokenizers import AddedToken, decoders, models

        alphabet = byte_alphabet()
        names = {token: "".join(alphabet[byte] for byte in token) for token in self._ranks}
        vocab = {names[token]: rank for token, rank in self._ranks.items()}
        merges = [(names[left], names[right]) for left, right in _merges(self._ranks)]
        fast = _fast_shell(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
        fast.decoder = decoders.ByteLevel()
        for name in self.control_names:
            special = name not in NOT_SPECIAL
            fast.add_tokens([AddedToken(name, normalized=False, special=special)])
        assert fast.token_to_id(self.control_names[-1]) == self.vocab_size - 1
        return fast


class StreamDecoder:
    """Ids to text as they arrive: a character is given out once its last byte is there.

    Law: the pieces of `push` and `flush`, joined, are `Tokenizer.decode` of all ids. A text cut
    within a character ends with one U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """Ends the text; the decoder may then begin another."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def _fast_shell(model: Any) -> Any:
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    fast = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    return fast


def _learn(texts: Iterable[str], num_ranks: int) -> dict[bytes, int]:
    from tokenizers import models, trainers

    fast = _fast_shell(models.BPE())
    alphabet = byte_alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_ranks, initial_alphabet=list(alphabet), show_progress=False
    )
    fast.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    byte_of = {char: byte for byte, char in enumerate(alphabet)}
    vocab = fast.get_vocab(with_added_tokens=False)
    ranks = {bytes(byte_of[char] for char in name): rank for name, rank in vocab.items()}
    assert sorted(ranks.values()) == list(range(len(ranks)))
    return ranks


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair that makes a token, in rank order: tiktoken merges any pair whose join is a token,
    lowest rank first.
    """
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def read_ranks(path: Path) -> dict[bytes, int]:
    """Reads a `tiktoken.model`: base64 of a token, a space, its rank, per line. UserError names the
    first bad line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(filter(None, lines), start=1):
        try:
            encoded, rank = line.split()
            token, value = base64.b64decode(encoded, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"{path}: line {number} is not 'base64 rank': {line[:60]!r}") from None
        if token in ranks:
            raise UserError(f"{path}: {token!r} has rank {ranks[token]} and again rank {value}")
        ranks[token] = value
    _check_ranks(path, ranks)
    return ranks


def _check_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    for expected, rank in enumerate(sorted(ranks.values())):
        if rank != expected:
            kind = "missing" if rank > expected else "given twice"
            raise UserError(f"{path}: rank {min(rank, expected)} is {kind} ({len(ranks)} tokens)")
    absent = [byte for byte in range(NUM_BYTES) if bytes([byte]) not in ranks]
    if absent:
        raise UserError(
            f"{path}: {len(absent)} of the 256 single bytes have no rank, the first is {absent[0]}"
        )


def _read_control_names(path: Path, first: int) -> tuple[str, ...]:
    """Names by id from `added_tokens_decoder`, ours where the file names none (the release names 16
    of 256).
    """
    try:
        added = json.loads(path.read_text(encoding="utf-8"))["added_tokens_decoder"]
        given = {int(token): str(entry["content"]) for token, entry in added.items()}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: added_tokens_decoder is not readable ({error!r})") from None
    for token, name in given.items():
        _check_control(path, token, name, first)
    return tuple(given.get(first + slot, name) for slot, name in enumerate(CONTROL_NAMES))


def _check_control(path: Path, token: int, name: str, first: int) -> None:
    """A released name must be in its released slot: a shifted id trains or stops on the wrong
    token.
    """
    if not first <= token < first + NUM_CONTROL:
        raise UserError(
            f"{path}: {name!r} has id {token}, the control ids of {first} ranks are "
            f"{first}..{first + NUM_CONTROL - 1}"
        )
    released = CONTROL_NAMES.index(name) + first if name in CONTROL_NAMES else token
    if released != token:
        raise UserError(f"{path}: {name!r} has id {token}, expected {released}")
