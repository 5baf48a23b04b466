"""Compressors' bits per byte against the command-line meaning of them."""

from __future__ import annotations

import gzip
import lzma
import random

from k3.data.baselines import gzip_bits_per_byte, xz_bits_per_byte

DOCUMENTS = [b"the same text again and again. " * 30, b"the same text again and again. " * 31]


def test_gzip_packs_each_file_alone():
    each = sum(len(gzip.compress(document, 9)) for document in DOCUMENTS)
    assert gzip_bits_per_byte(DOCUMENTS) == 8 * each / sum(map(len, DOCUMENTS))
    # Joined, the second would be nearly free.
    assert 8 * len(gzip.compress(b"".join(DOCUMENTS), 9)) < 0.7 * 8 * each


def test_xz_packs_all_as_one_stream():
    stream = b"".join(DOCUMENTS)
    assert xz_bits_per_byte(DOCUMENTS) == 8 * len(lzma.compress(stream, preset=9)) / len(stream)
    alone = sum(len(lzma.compress(document)) for document in DOCUMENTS)
    assert xz_bits_per_byte(DOCUMENTS) < 0.7 * 8 * alone / len(stream)


def test_noise_needs_eight_bits():
    noise = random.Random(0).randbytes(100_000)
    assert 7.9 < gzip_bits_per_byte([noise]) < 8.1
