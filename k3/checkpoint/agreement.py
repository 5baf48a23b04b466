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


def check_ids(folder: Path, config: K3Config, content: dict[str, Any]) -> None:
    """UserError if config.json (`content`), generation_config.json or the tokenizer's files, where
    they exist, disagree with the control ids of the vocabulary.
    """
    _check_section(folder / "config.json", "", content, config)
    if isinstance(text := content.get("text_config"), dict):
        _check_section(folder / "config.json", "text_config.", text, config)
    media = content.get("media_placeholder_token_id", config.media_placeholder_token_id)
    if media != config.media_placeholder_token_id:
        _refuse(folder / "config.json", "media_placeholder_token_id", media, config)
    generation = folder / "generation_config.json"
    if generation.is_file():
        _check_section(generation, "", read_json(generation), config)
    _check_tokenizer(folder, config)


def _check_section(path: Path, section: str, values: dict[str, Any], config: K3Config) -> None:
    for key in IDS:
        found = values.get(key)
        ids = found if isinstance(found, list) else [found]
        if found is not None and getattr(config, key) not in ids:
            _refuse(path, section + key, found, config)


def _refuse(path: Path, key: str, found: Any, config: K3Config) -> None:
    expected = getattr(config, key.rpartition(".")[2])
    raise UserError(
        f"{path}: {key} is {found}, in a vocabulary of {config.vocab_size} it must be {expected}"
    )


def _check_tokenizer(folder: Path, config: K3Config) -> None:
    ranks = folder / "tiktoken.model"
    if ranks.is_file():
        count = sum(1 for line in ranks.read_bytes().splitlines() if line.strip())
        if count + CONTROL_SLOTS != config.vocab_size:
            raise UserError(
                f"{ranks}: {count} ranks and {CONTROL_SLOTS} control ids make "
                f"{count + CONTROL_SLOTS} ids, config.json has vocab_size {config.vocab_size}"
            )
    names = folder / "tokenizer_config.json"
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
