"""The 256 control ids at the top of every vocabulary, by their released names.

The released vocabulary has 163,584 byte-pair ranks and then 256 control slots. A vocabulary of
another size V keeps the same slots at the same distance from its end: control id = V - 256 +
(released id - 163584). Slots without a released name are `<|reserved_i|>`, i counted from the first
slot, so that no id ever shifts because a gap was closed.
"""

from __future__ import annotations

NUM_CONTROL = 256

BOS = "[BOS]"
EOS = "[EOS]"
END_OF_MSG = "<|end_of_msg|>"
OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
MEDIA_PAD = "<|media_pad|>"
UNK = "[UNK]"
PAD = "[PAD]"

_RELEASED = {
    0: BOS,
    1: EOS,
    2: END_OF_MSG,
    3: OPEN,
    4: CLOSE,
    5: SEP,
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: MEDIA_PAD,
    65: "<osagent_mode>",
    254: UNK,
    255: PAD,
}

CONTROL_NAMES: tuple[str, ...] = tuple(
    _RELEASED.get(slot, f"<|reserved_{slot}|>") for slot in range(NUM_CONTROL)
)
"""The name of each slot, in id order."""

CONTROL_SLOTS: dict[str, int] = {name: slot for slot, name in enumerate(CONTROL_NAMES)}

NOT_SPECIAL = frozenset({OPEN, CLOSE, SEP})
"""Declared `special: false` in the release: decoders that skip special tokens keep the structure of
a message.
"""


def control_id(vocab_size: int, name: str) -> int:
    """The id of the control token `name` in a vocabulary of `vocab_size`. KeyError on an unknown
    name.
    """
    return vocab_size - NUM_CONTROL + CONTROL_SLOTS[name]
