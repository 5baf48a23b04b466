"""However a text is cut into ids and pushes, the joined pieces are its decoding."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.text.control import NUM_CONTROL
from k3.text.tokenizer import NUM_BYTES, Tokenizer, byte_alphabet

_ORDER = sorted(range(NUM_BYTES), key=lambda byte: byte_alphabet()[byte])
BYTES = Tokenizer({bytes([byte]): rank for rank, byte in enumerate(_ORDER)})
"""Every byte a token: each character of several bytes arrives in parts."""


def spelled(data: bytes) -> list[int]:
    return [_ORDER.index(byte) for byte in data]


def streamed(ids: list[int]) -> list[str]:
    decoder = BYTES.stream()
    return [decoder.push(token) for token in ids] + [decoder.flush()]


@pytest.mark.parametrize(
    "text", ["\U0001fae0", "中文混合", "é", "a\u0301\U0001f468\u200d\U0001f469"]
)
def test_a_character_is_given_out_with_its_last_byte(text: str):
    ids = spelled(text.encode())
    out = streamed(ids)
    assert "".join(out) == text
    assert all("\ufffd" not in piece for piece in out)
    # Decoding every id alone, the naive way, breaks the character.
    assert "".join(BYTES.decode([token]) for token in ids) != text


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_cut_character_is_one_replacement_at_the_end(kept: int):
    ids = spelled("ab\U0001fae0".encode()[: 2 + kept])
    assert streamed(ids) == ["a", "b"] + [""] * kept + ["\ufffd"]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=24))
def test_any_ids_stream_to_their_decoding(ids: list[int]):
    assert "".join(streamed(ids)) == BYTES.decode(ids)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=24), st.data())
def test_any_split_of_any_bytes(data: bytes, draw: st.DataObject):
    cut = draw.draw(st.integers(0, len(data)))
    decoder = BYTES.stream()
    text = "".join(decoder.push(token) for token in spelled(data[:cut]))
    text += "".join(decoder.push(token) for token in spelled(data[cut:])) + decoder.flush()
    assert text == data.decode("utf-8", errors="replace")


def test_flush_begins_anew_and_control_names_come_through():
    decoder = BYTES.stream()
    assert decoder.push(spelled(b"\xe4")[0]) == "" and decoder.flush() == "\ufffd"
    assert decoder.push(spelled(b"z")[0]) == "z" and decoder.flush() == ""
    end = BYTES.encode_control("<|end_of_msg|>")
    assert end == NUM_BYTES + NUM_CONTROL - 254
    assert streamed([spelled(b"\xe4")[0], end])[:2] == ["", "\ufffd<|end_of_msg|>"]
