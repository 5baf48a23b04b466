"""A corpus: which documents of a source are kept, which are held out, and one hash that says so.

Documents are taken in the order of a hash of their path, so that a smaller `max_bytes` takes a
subset of what a larger one takes, on every machine. Held-out documents are taken first: a training
document that mostly repeats one of them is dropped, and they do not depend on how much is trained
on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k3 import UserError
from k3.data.sources import Entry, list_documents

VALIDATION_SHARE = 0.02
MIN_BYTES = 10_000
LONG_LINE = 40
"""Characters from which a line is telling enough to count for near-duplicates."""
SEEN_SHARE = 0.5
"""A document with more of its long lines than this seen in earlier ones is a near-duplicate."""

Progress = Callable[[str, int, int], None]
"""progress(what, done, total): what is going on and how far it is."""


@dataclass(frozen=True)
class Document:
    """A kept document. `read` gives its bytes again, which are valid UTF-8."""

    path: str
    size: int
    sha256: str
    read: Callable[[], bytes] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Corpus:
    """The kept documents of a source, in reading order, and what was left out."""

    source: str
    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    skipped: dict[str, int]
    """How many documents were left out as binary, empty, duplicate, near_duplicate."""
    sha256: str
    """Over the sorted (split, path, content hash) of all kept documents."""

    @property
    def train_bytes(self) -> int:
        return sum(document.size for document in self.train)

    @property
    def validation_bytes(self) -> int:
        return sum(document.size for document in self.validation)

    def describe(self) -> str:
        """One line: sizes, what was left out, and the hash."""
        left_out = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items() if count)
        return (
            f"{self.source}: {len(self.train):,} documents, {self.train_bytes / 1e6:.1f} MB; "
            f"held out {len(self.validation):,}, {self.validation_bytes / 1e6:.2f} MB; "
            f"left out {left_out or 'none'}; sha256 {self.sha256[:16]}"
        )

    def export(self, path: Path | str) -> None:
        """Writes the corpus as one JSONL file that reads back, as a source, with the same hash.

        For a machine that does not have the pinned packages. UserError if it cannot be written;
        nothing is left then.
        """
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial")
        try:
            with open(partial, "w", encoding="utf-8") as handle:
                for document in (*self.validation, *self.train):
                    row = {"path": document.path, "text": document.read().decode()}
                    handle.write(json.dumps(row, ensure_ascii=False) + "\n")
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def read_corpus(
    source: str,
    *,
    max_bytes: int = 0,
    val_bytes: int = 0,
    progress: Progress | None = None,
) -> Corpus:
    """`read_corpora` of one source."""
    (corpus,) = read_corpora([source], max_bytes=max_bytes, val_bytes=val_bytes, progress=progress)
    return corpus


def read_corpora(
    sources: Sequence[str],
    *,
    max_bytes: int = 0,
    val_bytes: int = 0,
    progress: Progress | None = None,
) -> list[Corpus]:
    """Reads, filters and splits sources (see `list_documents`); limits are for each.

    About 2% of the source's documents are set aside; of these, documents are held out until
    `val_bytes` are reached, passing over one larger than a quarter of it. Training takes documents
    of the others until `max_bytes` are reached. 0 is no limit. UserError if there is not at least
    one document for each and 10,000 bytes in all.

    All sources' held-out documents are taken before any training document, and what one source has
    is a duplicate in a later one: no source trains on what another holds out.
    """
    seen = _Seen()
    halves = [_hold_out(source, _Sieve(seen), val_bytes) for source in sources]
    return [_with_training(half, max_bytes, progress) for half in halves]


@dataclass(frozen=True)
class _Half:
    """A source of which the held-out documents are taken and the others still to be read."""

    source: str
    sieve: _Sieve
    validation: list[Document]
    rest: list[Entry]


def _hold_out(source: str, sieve: _Sieve, val_bytes: int) -> _Half:
    aside, rest = _split(list_documents(source))
    validation = list(_take(aside, sieve, val_bytes, largest=val_bytes // 4))
    while not validation and rest:
        validation = list(_take([rest.pop(0)], sieve))
    return _Half(source, sieve, validation, rest)


def _with_training(half: _Half, max_bytes: int, progress: Progress | None) -> Corpus:
    entries = sorted(half.rest, key=lambda entry: _hash("order", entry.path))
    documents = _take(entries, half.sieve, max_bytes)
    train = list(_reported(documents, max_bytes, len(entries), progress))
    _check_size(half.source, train, half.validation)
    return Corpus(
        half.source,
        tuple(train),
        tuple(half.validation),
        half.sieve.skipped,
        _identity({"train": train, "validation": half.validation}),
    )


def _split(entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Held-out candidates and the rest, both in the order of the hash that decides. Paths are
    unique."""
    ordered = sorted({entry.path: entry for entry in entries}.values(), key=_split_key)
    border = VALIDATION_SHARE * 2**64
    count = sum(_split_key(entry) < border for entry in ordered)
    return ordered[:count], ordered[count:]


def _split_key(entry: Entry) -> int:
    return _hash("split", entry.path)


def _hash(purpose: str, path: str) -> int:
    digest = hashlib.sha256(f"{purpose}\0{path}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def _take(
    entries: Iterable[Entry], sieve: _Sieve, limit: int = 0, largest: int = 0
) -> Iterator[Document]:
    size = 0
    for entry in entries:
        if limit and size >= limit:
            break
        if (document := sieve.keep(entry, largest)) is not None:
            yield document
            size += document.size


def _reported(
    documents: Iterable[Document], max_bytes: int, count: int, progress: Progress | None
) -> Iterator[Document]:
    """Tells `progress` of the bytes read where they are limited, else of the documents."""
    size = 0
    for number, document in enumerate(documents, start=1):
        size += document.size
        if progress and number % 64 == 0:
            progress("read", min(size, max_bytes) or number, max_bytes or count)
        yield document


@dataclass
class _Seen:
    """What the documents kept so far contain."""

    contents: set[bytes] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)


class _Sieve:
    """Keeps a document unless it is no text, empty, or mostly repeats those kept before."""

    def __init__(self, seen: _Seen) -> None:
        self.skipped = {"binary": 0, "empty": 0, "duplicate": 0, "near_duplicate": 0}
        self._seen = seen

    def keep(self, entry: Entry, largest: int) -> Document | None:
        data = entry.read()
        if largest and len(data) > largest:
            return None
        if (reason := self._reason(data)) is not None:
            self.skipped[reason] += 1
            return None
        return Document(entry.path, len(data), hashlib.sha256(data).hexdigest(), entry.read)

    def _reason(self, data: bytes) -> str | None:
        try:
            lines = [line.strip() for line in data.decode("utf-8").splitlines()]
        except UnicodeDecodeError:
            return "binary"
        if b"\0" in data:
            return "binary"
        content = "\n".join(filter(None, lines))
        if not content:
            return "empty"
        digest = hashlib.sha256(content.encode()).digest()
        if digest in self._seen.contents:
            return "duplicate"
        # Python's own string hash is keyed anew in every process; only equality counts here.
        long_lines = {hash(line) for line in lines if len(line) >= LONG_LINE}
        if len(long_lines & self._seen.lines) > SEEN_SHARE * len(long_lines):
            return "near_duplicate"
        self._seen.contents.add(digest)
        self._seen.lines |= long_lines
        return None


def _identity(splits: dict[str, list[Document]]) -> str:
    rows = sorted(
        f"{split}\t{document.path}\t{document.sha256}\n"
        for split, documents in splits.items()
        for document in documents
    )
    return hashlib.sha256("".join(rows).encode("utf-8", "surrogatepass")).hexdigest()


def texts(documents: Iterable[Document]) -> Iterator[str]:
    """The documents' text, read one after another. UserError if a file changed since it was first
    read."""
    for document in documents:
        data = document.read()
        found = hashlib.sha256(data).hexdigest()
        if found != document.sha256:
            raise UserError(
                f"{document.path}: changed while it was read, sha256 {document.sha256[:16]} "
                f"({document.size} bytes) became {found[:16]} ({len(data)} bytes)"
            )
        yield data.decode("utf-8")


def _check_size(source: str, train: list[Document], validation: list[Document]) -> None:
    found = sum(document.size for document in (*train, *validation))
    if not train or not validation or found < MIN_BYTES:
        raise UserError(
            f"data source {source!r} is too small: {found} bytes of text in {len(train)} training "
            f"and {len(validation)} held-out documents, needed {MIN_BYTES} bytes and one of each"
        )
