"""From a data configuration to numbered micro-batches, resumable at any of them.

Micro-batches are numbered over all ranks: a step of M on w ranks gives rank r those with number % w
== r. The position is a few integers, the same on every rank after a step, so a run may resume on
another number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3 import UserError
from k3.data.batch import Batch
from k3.data.cache import default_cache, open_or_build
from k3.data.corpus import Corpus, Document, Progress, read_corpora, texts
from k3.data.mixture import Mixture
from k3.data.packing import Packing, Piece, cut, pack
from k3.data.tokens import TokenStore, token_store
from k3.text.control import PAD
from k3.text.tokenizer import Tokenizer

STATE_FORMAT = 1


@dataclass(frozen=True)
class SourceConfig:
    """One source of the mixture."""

    path: str
    """"default", "site-packages", a folder, a text file, `.jsonl` or `.parquet`."""
    weight: float = 1.0
    """Share of the micro-batches, relative to the other sources' weights."""
    name: str = ""
    """For reports and checkpoints; the path if empty."""

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("data.sources: a source has an empty path")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise UserError(f"source {self.label!r}: weight must be positive, got {self.weight}")

    @property
    def label(self) -> str:
        return self.name or self.path

    @classmethod
    def parse(cls, text: str) -> SourceConfig:
        """ "PATH" or "PATH=WEIGHT", as a command line gives it."""
        path, equals, weight = text.rpartition("=")
        try:
            return cls(path, float(weight)) if equals else cls(text)
        except UserError:
            raise
        except ValueError:
            return cls(text)


@dataclass(frozen=True)
class DataConfig:
    """What is read and how it is cut."""

    sources: tuple[SourceConfig, ...] = (SourceConfig("default"),)
    """Mixed by weight."""
    vocab_size: int = 2048
    """Byte-pair ranks and 256 control ids."""
    tokenizer: str = ""
    """Folder of an existing tokenizer; empty trains one on the training documents."""
    tokenizer_bytes: int = 0
    """At most this much text trains the tokenizer; 0 is 500 bytes per id and at least 16 MB."""
    tokens_per_micro_batch: int = 4096
    """Length of a pack in tokens."""
    seed: int = 0
    """Order of the documents in each epoch."""
    max_bytes: int = 0
    """Training text taken from each source, 0 for all."""
    val_bytes: int = 262_144
    """Held-out text taken from each source (the last document may go over), 0 for all that is held
    out."""
    cache_dir: str = ""
    """Where tokenizers and token stores are kept; empty is `$XDG_CACHE_HOME/openk3` or
    `~/.cache/openk3`."""
    threads: int = 2
    """Threads that tokenise."""

    def __post_init__(self) -> None:
        labels = [source.label for source in self.sources]
        if not labels or len(set(labels)) != len(labels):
            raise UserError(f"data.sources: names must be given and differ, got {labels}")
        for name in ("tokens_per_micro_batch", "threads"):
            if getattr(self, name) < 1:
                raise UserError(f"data.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("tokenizer_bytes", "max_bytes", "val_bytes", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"data.{name} must not be negative, got {getattr(self, name)}")

    def micro_batch_tokens(self, context: int) -> int:
        """Tokens of a micro-batch at a context length: never less than one whole window."""
        return max(self.tokens_per_micro_batch, context)


@dataclass
class _Stream:
    """One source, ready to be read."""

    corpus: Corpus
    train: TokenStore
    validation: TokenStore
    packing: Packing
    position: int = 0
    """Where on the training stream the next micro-batch begins."""
    context: int = 0
    """Window length of the epoch that `position` lies in; 0 before the first micro-batch."""

    def take(self, tokens: int, context: int) -> int:
        """Reserves the next `tokens` tokens and returns where they begin."""
        if context != self.context:
            self.position, self.context = self.packing.next_epoch(self.position), context
        begin, self.position = self.position, self.position + tokens
        return begin


class Loader:
    """Micro-batches of the mixture, held-out batches, and the state to go on from.

    Building one reads the sources, trains or opens the tokenizer and tokenises what is not in the
    cache yet.
    """

    def __init__(self, config: DataConfig, progress: Progress | None = None) -> None:
        self.config = config
        read = read_corpora(
            [source.path for source in config.sources],
            max_bytes=config.max_bytes,
            val_bytes=config.val_bytes,
            progress=progress,
        )
        corpora = {
            source.label: corpus for source, corpus in zip(config.sources, read, strict=True)
        }
        self.tokenizer = _tokenizer(config, corpora, progress)
        self._pad = self.tokenizer.encode_control(PAD)
        self._streams = {
            name: _stream(config, corpus, self.tokenizer, progress)
            for name, corpus in corpora.items()
        }
        self._mixture = Mixture({source.label: source.weight for source in config.sources})
        self._token_bytes = _token_bytes(self.tokenizer)

    @property
    def corpora(self) -> dict[str, Corpus]:
        return {name: stream.corpus for name, stream in self._streams.items()}

    @property
    def corpus_sha256(self) -> str:
        """Of the one corpus, or over the names and hashes of several."""
        hashes = {name: corpus.sha256 for name, corpus in self.corpora.items()}
        return _joint_hash(hashes) if len(hashes) > 1 else next(iter(hashes.values()))

    @property
    def epoch_tokens(self) -> dict[str, int]:
        """Training tokens of each source."""
        return {name: stream.packing.epoch_tokens for name, stream in self._streams.items()}

    def next(self, context: int, rank: int = 0, world: int = 1) -> Batch:
        """This rank's part of the next `world` micro-batches, in windows of at most `context`
        tokens."""
        assert 0 <= rank < world and context > 0
        tokens = self.config.micro_batch_tokens(context)
        for number in range(world):
            stream = self._streams[self._mixture.draw()]
            begin = stream.take(tokens, context)
            if number == rank:
                mine, position = stream, begin
        pieces = list(mine.packing.pieces(position, tokens, context))
        return pack(mine.train, pieces, self._pad)

    def validation(self, context: int) -> Iterator[tuple[Batch, int]]:
        """Held-out batches in a fixed order, each with the UTF-8 bytes that its targets stand for.

        Bits per byte is the summed loss over those bytes times ln 2. A document's first token,
        which nothing predicts, counts for neither; its end token costs bits and has no bytes. What
        a span can see does not depend on the size of a batch: batches hold whole spans, up to
        `tokens_per_micro_batch` or one span.
        """
        for stream in self._streams.values():
            for pieces in self._held_out(stream.validation, context):
                batch = pack(stream.validation, pieces, self._pad)
                targets = batch.targets_T.numpy()
                yield batch, int(self._token_bytes[targets[targets >= 0]].sum())

    def _held_out(self, store: TokenStore, context: int) -> Iterator[list[Piece]]:
        group: list[Piece] = []
        size = 0
        for document, length in enumerate(store.lengths.tolist()):
            for piece in cut(Piece(document, 0, length), context):
                if group and size + piece.length > self.config.tokens_per_micro_batch:
                    yield group
                    group, size = [], 0
                group.append(piece)
                size += piece.length
        yield group

    def held_out_documents(self) -> list[bytes]:
        """The documents behind `validation`, in its order, for other compressors."""
        corpora = self.corpora.values()
        return [document.read() for corpus in corpora for document in corpus.validation]

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on exactly here; plain JSON."""
        return {
            "format": STATE_FORMAT,
            "seed": self.config.seed,
            "tokenizer": self.tokenizer.fingerprint,
            "sources": {name: self._source_state(name) for name in self._streams},
        }

    def _source_state(self, name: str) -> dict[str, Any]:
        stream = self._streams[name]
        return {
            "corpus": stream.corpus.sha256,
            "weight": self._mixture.weights[name],
            "micro_batches": self._mixture.counts[name],
            "position": stream.position,
            "context": stream.context,
            "epoch": stream.position // stream.packing.epoch_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position. UserError with both values if the data, order or tokenizer is
        another."""
        own = self.state_dict()
        for key in ("format", "seed", "tokenizer"):
            _same(key, state.get(key), own[key])
        sources = state["sources"]
        _same("sources", list(sources), list(self._streams))
        for name, saved in sources.items():
            for key in ("corpus", "weight"):
                _same(f"{key} of source {name!r}", saved.get(key), own["sources"][name][key])
        for name, saved in sources.items():
            self._streams[name].position = int(saved["position"])
            self._streams[name].context = int(saved["context"])
            self._mixture.counts[name] = int(saved["micro_batches"])


def _same(what: str, saved: Any, own: Any) -> None:
    if saved != own:
        raise UserError(f"data state: {what} was {saved}, this run has {own}")


def _stream(
    config: DataConfig, corpus: Corpus, tokenizer: Tokenizer, progress: Progress | None
) -> _Stream:
    cache = _cache(config)
    key = _joint_hash({"corpus": corpus.sha256, "tokenizer": tokenizer.fingerprint})[:24]

    def store(split: str, documents: tuple[Document, ...]) -> TokenStore:
        return token_store(
            cache / f"tokens-{key}-{split}",
            corpus.sha256,
            lambda: texts(documents),
            tokenizer,
            threads=config.threads,
            total_bytes=sum(document.size for document in documents),
            progress=progress,
        )

    train = store("train", corpus.train)
    return _Stream(
        corpus, train, store("validation", corpus.validation), Packing(train.lengths, config.seed)
    )


def _tokenizer(
    config: DataConfig, corpora: dict[str, Corpus], progress: Progress | None
) -> Tokenizer:
    if config.tokenizer:
        return Tokenizer.load(config.tokenizer, vocab_size=config.vocab_size)
    limit = config.tokenizer_bytes or max(16_000_000, 500 * config.vocab_size)
    facts = {
        "corpora": ",".join(corpus.sha256 for corpus in corpora.values()),
        "vocab_size": config.vocab_size,
        "bytes": limit,
    }
    folder = _cache(config) / f"tokenizer-{_joint_hash(facts)[:24]}"

    def train(where: Path) -> None:
        if progress:
            progress("train the tokenizer", 0, 1)
        sample = _tokenizer_sample(limit, corpora)
        Tokenizer.train(texts(sample), config.vocab_size).save(where)

    return open_or_build(folder, lambda where: Tokenizer.load(where, config.vocab_size), train)


def _tokenizer_sample(limit: int, corpora: dict[str, Corpus]) -> Iterator[Document]:
    """Training documents of every source, an equal share of the bytes from each."""
    for corpus in corpora.values():
        left = limit // len(corpora)
        for document in corpus.train:
            if left <= 0:
                break
            left -= document.size
            yield document


def _token_bytes(tokenizer: Tokenizer) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64 [V]: UTF-8 bytes that each id stands for; control ids stand for none."""
    ordinary = tokenizer.vocab_size - len(tokenizer.control_names)
    lengths = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    lengths[:ordinary] = [len(tokenizer.token_bytes(token)) for token in range(ordinary)]
    return lengths


def _cache(config: DataConfig) -> Path:
    return Path(config.cache_dir).expanduser() if config.cache_dir else default_cache()


def _joint_hash(facts: dict[str, Any]) -> str:
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
