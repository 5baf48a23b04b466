"""What ordinary compressors need for the same held-out documents, in bits per byte."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Sequence


def gzip_bits_per_byte(documents: Sequence[bytes]) -> float:
    """gzip -9, every document on its own (header and checksum counted, as for a file)."""
    packed = sum(len(gzip.compress(document, 9, mtime=0)) for document in documents)
    return 8 * packed / sum(map(len, documents))


def xz_bits_per_byte(documents: Sequence[bytes]) -> float:
    """xz -9e, all documents in order as one stream, so that later ones profit from earlier ones."""
    stream = b"".join(documents)
    return 8 * len(lzma.compress(stream, preset=9 | lzma.PRESET_EXTREME)) / len(stream)
