"""The files of a checkpoint folder that name token ids must name the same ones: a shifted stop id
or vocabulary would otherwise train or stop on the wrong token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from k3 import UserError
from k3.checkpoint.shards import read_json
from k3.model.config import CONTROL_SLOTS, K3Config, control_id

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
CONTROL = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|end_of_msg|>": 163586,
    "<|open|>": 163587,
    "<|close|>": 163588,
    "<|sep|>": 163589,
    "<|media_pad|>": 163605,
    "[UNK]": 163838,
    "[PAD]": 163839,
}
"""Released ids of the names that change what a model does."""
RANKS, NAMES = "tiktoken.model", "tokenizer_config.json"


def check_ids(folder: Path, config: K3Config, content: dict[str, Any]) -> None:
    """UserError if config.json (`content`), generation_config.json and the tokenizer's files name
    different ids.

    With a tokenizer every id must be that of the vocabulary. Without one, ids are only numbers that
    the network never looks at, and it's enough that the files say the same.
    """
    stated = [(folder / "config.json", "", content)]
    if isinstance(text := content.get("text_config"), dict):
        stated.append((folder / "config.json", "text_config.", text))
    generation = folder / "generation_config.json"
    if generation.is_file():
        stated.append((generation, "", read_json(generation)))
    if not any((folder / name).is_file() for name in (RANKS, NAMES)):
        for key in IDS:
            _check_each_other([(path, section + key, v.get(key)) for path, section, v in stated])
        return
    for path, section, values in stated:
        for key in (*IDS, "media_placeholder_token_id"):
            _check_id(path, section + key, values.get(key), config)
    _check_tokenizer(folder, config)


def _check_id(path: Path, key: str, found: Any, config: K3Config) -> None:
    expected = getattr(config, key.rpartition(".")[2])
    if found is not None and expected not in _ids(found):
        size = config.vocab_size
        raise UserError(
            f"{path}: {key} is {found}, in a vocabulary of {size} it must be {expected}"
        )


def _check_each_other(stated: list[tuple[Path, str, Any]]) -> None:
    given = [entry for entry in stated if entry[2] is not None]
    for path, key, found in given[1:]:
        first_path, first_key, first = given[0]
        if not any(token in _ids(first) for token in _ids(found)):
            raise UserError(f"{path}: {key} is {found}, {first_path}: {first_key} is {first}")


def _ids(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _check_tokenizer(folder: Path, config: K3Config) -> None:
    ranks = folder / RANKS
    if ranks.is_file():
        count = sum(1 for line in ranks.read_bytes().splitlines() if line.strip())
        if count + CONTROL_SLOTS != config.vocab_size:
            raise UserError(
                f"{ranks}: {count} ranks and {CONTROL_SLOTS} control ids make "
                f"{count + CONTROL_SLOTS} ids, config.json has vocab_size {config.vocab_size}"
            )
    names = folder / NAMES
    if not names.is_file():
        return
    added = read_json(names).get("added_tokens_decoder") or {}
    for token, entry in added.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if name in CONTROL and token != str(control_id(config.vocab_size, CONTROL[name])):
            raise UserError(
                f"{names}: {name} is {token}, in a vocabulary of {config.vocab_size} it must be "
                f"{control_id(config.vocab_size, CONTROL[name])}"
            )
