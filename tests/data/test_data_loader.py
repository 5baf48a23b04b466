"""The loader as training sees it: the same micro-batches however many ranks, resumed anywhere."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch

from k3 import UserError
from k3.data.batch import IGNORE, Batch
from k3.data.loader import DataConfig, Loader, SourceConfig

VOCAB = 600


def write_source(root: Path, seed: int, count: int = 60) -> Path:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgh", k=draw.randrange(2, 7))) for _ in range(300)]
    root.mkdir(parents=True)
    for number in range(count):
        text = "".join(
            " ".join(draw.choices(words, k=draw.randrange(3, 12))) + "\n"
            for _ in range(draw.randrange(5, 60))
        )
        (root / f"{number}.txt").write_text(text)
    return root


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    root = tmp_path_factory.mktemp("data")
    return DataConfig(
        sources=(
            SourceConfig(str(write_source(root / "a", 1)), 0.7, "prose"),
            SourceConfig(str(write_source(root / "b", 2)), 0.3, "code"),
        ),
        vocab_size=VOCAB,
        tokens_per_micro_batch=256,
        seed=5,
        val_bytes=4000,
        cache_dir=str(root / "cache"),
    )


def one_source(config: DataConfig, **changes) -> DataConfig:
    return dataclasses.replace(config, sources=config.sources[:1], **changes)


def ids(batch: Batch) -> list[int]:
    return batch.ids_T.tolist()


def test_batches_are_whole_and_repeatable(config: DataConfig):
    first, second = Loader(config), Loader(config)
    for _ in range(5):
        batch, same = first.next(64), second.next(64)
        assert batch.num_tokens == 256 and batch.spans.max_len <= 64
        assert ids(batch) == ids(same)
        assert batch.ids_T.max() < VOCAB and batch.ids_T.dtype == torch.int64


def test_every_rank_count_sees_the_same_micro_batches(config: DataConfig):
    alone = Loader(config)
    expected = [ids(alone.next(64)) for _ in range(12)]
    for world in (2, 3, 4):
        ranks = [Loader(config) for _ in range(world)]
        seen = [
            ids(loader.next(64, rank, world))
            for _ in range(12 // world)
            for rank, loader in enumerate(ranks)
        ]
        assert seen == expected
        assert all(loader.state_dict() == alone.state_dict() for loader in ranks)


@pytest.mark.parametrize("at", [0, 1, 7, 30])
def test_resume_goes_on_exactly_also_at_another_rank_count(config: DataConfig, at: int):
    whole = Loader(config)
    for _ in range(at):
        whole.next(64)
    state = json.loads(json.dumps(whole.state_dict()))
    expected = [ids(whole.next(64)) for _ in range(6)]
    resumed = Loader(config)
    resumed.next(64)
    resumed.load_state_dict(state)
    assert [ids(resumed.next(64)) for _ in range(6)] == expected
    pair = [Loader(config), Loader(config)]
    for loader in pair:
        loader.load_state_dict(state)
    assert [ids(pair[n % 2].next(64, n % 2, 2)) for n in range(6)] == expected


def test_resume_deep_in_a_later_epoch(config: DataConfig):
    loader = Loader(one_source(config))
    steps = 3 * loader.epoch_tokens["prose"] // 256 + 2
    for _ in range(steps):
        loader.next(64)
    state = loader.state_dict()
    assert state["sources"]["prose"]["epoch"] == 3
    resumed = Loader(one_source(config))
    resumed.load_state_dict(state)
    assert ids(resumed.next(64)) == ids(loader.next(64))


def test_an_epoch_reads_each_document_once_then_in_another_order(config: DataConfig):
    loader = Loader(one_source(config))
    end = loader.tokenizer.encode_control("[EOS]")
    total = loader.epoch_tokens["prose"]
    stream = ids(loader.next(2 * total))

    def documents(tokens: list[int]) -> list[str]:
        assert tokens[-1] == end
        return loader.tokenizer.decode(tokens).split("[EOS]")[:-1]

    expected = sorted(document.read().decode() for document in loader.corpora["prose"].train)
    first, second = documents(stream[:total]), documents(stream[total : 2 * total])
    assert sorted(first) == sorted(second) == expected
    assert first != second


def test_another_context_begins_at_the_next_epoch(config: DataConfig):
    loader = Loader(one_source(config))
    total = loader.epoch_tokens["prose"]
    for context, start in ((32, 0), (32, 256), (64, total), (64, total + 256), (32, 2 * total)):
        batch = loader.next(context)
        assert batch.spans.max_len <= context
        saved = loader.state_dict()["sources"]["prose"]
        assert (saved["position"], saved["context"]) == (start + 256, context)


def test_the_mixture_keeps_its_shares(config: DataConfig):
    loader = Loader(config)
    for _ in range(100):
        loader.next(64)
    counts = {name: s["micro_batches"] for name, s in loader.state_dict()["sources"].items()}
    assert counts == {"prose": 70, "code": 30}


def test_validation_is_fixed_and_apart_from_training(config: DataConfig):
    loader = Loader(config)
    loader.next(64)
    before = loader.state_dict()
    first = [(ids(batch), size) for batch, size in loader.validation(64)]
    assert first == [(ids(batch), size) for batch, size in Loader(config).validation(64)]
    assert loader.state_dict() == before
    held_out = loader.tokenizer.decode(token for batch, _ in first for token in batch)
    expected = [document.decode() for document in loader.held_out_documents()]
    assert held_out.split("[EOS]")[:-1] == expected
    for corpus in loader.corpora.values():
        train = {document.sha256 for document in corpus.train}
        assert not train & {document.sha256 for document in corpus.validation}


def test_validation_counts_the_bytes_that_are_predicted(config: DataConfig):
    loader = Loader(config)
    documents = loader.held_out_documents()
    first_tokens = [loader.tokenizer.encode(document.decode())[0] for document in documents]
    unpredicted = sum(len(loader.tokenizer.token_bytes(token)) for token in first_tokens)
    for context in (16, 64, 4096):
        total = sum(size for _, size in loader.validation(context))
        # Counting all bytes would credit the first tokens, which no loss pays for.
        assert total == sum(map(len, documents)) - unpredicted


def test_what_validation_sees_does_not_depend_on_the_batch_size(config: DataConfig):
    def spans(size: int) -> list[list[int]]:
        loader = Loader(dataclasses.replace(config, tokens_per_micro_batch=size))
        return [
            ids(batch)[start:stop]
            for batch, _ in loader.validation(64)
            for start, stop in zip(batch.spans.offsets, batch.spans.offsets[1:], strict=False)
        ]

    assert spans(70) == spans(256) == spans(10_000)
    largest = [batch.num_tokens for batch, _ in Loader(config).validation(64)]
    assert max(largest) <= 256 and len(largest) > 3


def test_held_out_text_does_not_depend_on_how_much_is_trained_on(config: DataConfig):
    little = Loader(dataclasses.replace(config, max_bytes=12_000))
    assert little.held_out_documents() == Loader(config).held_out_documents()
    assert little.epoch_tokens["prose"] < Loader(config).epoch_tokens["prose"]


@pytest.mark.parametrize("key", ["seed", "tokenizer", "corpus", "weight", "names", "format"])
def test_another_runs_state_is_refused_with_both_values(config: DataConfig, key: str):
    loader = Loader(config)
    state = json.loads(json.dumps(loader.state_dict()))
    if key in ("corpus", "weight"):
        state["sources"]["code"][key] = "gone"
    elif key == "names":
        state["sources"]["extra"] = state["sources"].pop("code")
    else:
        state[key] = "gone"
    before = loader.state_dict()
    with pytest.raises(
        UserError, match=r"data state: .* was .*(gone|extra).*, this run has"
    ) as caught:
        loader.load_state_dict(state)
    assert "\n" not in str(caught.value) and loader.state_dict() == before


def test_state_of_a_changed_corpus_is_refused(tmp_path: Path):
    root = write_source(tmp_path / "src", 3)
    config = DataConfig(
        sources=(SourceConfig(str(root)),), vocab_size=VOCAB, cache_dir=str(tmp_path / "cache")
    )
    loader = Loader(config)
    state = loader.state_dict()
    (root / "7.txt").write_text("changed " * 40)
    # The tokenizer is kept, so that only the corpus differs.
    loader.tokenizer.save(tmp_path / "tokenizer")
    changed = Loader(dataclasses.replace(config, tokenizer=str(tmp_path / "tokenizer")))
    old, new = loader.corpus_sha256, changed.corpus_sha256
    with pytest.raises(UserError, match=f"corpus of source .* was {old}, this run has {new}"):
        changed.load_state_dict(state)


def test_a_given_tokenizer_is_used_and_must_fit(config: DataConfig, tmp_path: Path):
    loader = Loader(config)
    loader.tokenizer.save(tmp_path)
    given = Loader(dataclasses.replace(config, tokenizer=str(tmp_path)))
    assert ids(given.next(64)) == ids(loader.next(64))
    with pytest.raises(UserError, match="make 600 ids, the model's vocab_size is 700"):
        Loader(dataclasses.replace(config, tokenizer=str(tmp_path), vocab_size=700))


def test_the_cache_is_used_again(config: DataConfig, monkeypatch: pytest.MonkeyPatch):
    Loader(config)

    def never(*args, **kwargs):
        raise AssertionError("tokenised or trained again")

    monkeypatch.setattr("k3.text.tokenizer.Tokenizer.encode_batch", never)
    monkeypatch.setattr("k3.text.tokenizer.Tokenizer.train", never)
    Loader(config).next(64)


def test_targets_of_a_batch_are_the_streams(config: DataConfig):
    loader = Loader(one_source(config, tokens_per_micro_batch=100))
    first, second = loader.next(64), loader.next(64)
    assert first.targets_T[-1].item() in (IGNORE, second.ids_T[0].item())
    inside = first.targets_T[:-1] != IGNORE
    assert torch.equal(first.targets_T[:-1][inside], first.ids_T[1:][inside])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ()}, "names must be given and differ"),
        ({"sources": (SourceConfig("a"), SourceConfig("b", name="a"))}, "names must be given"),
        ({"tokens_per_micro_batch": 0}, "tokens_per_micro_batch must be at least 1, got 0"),
        ({"max_bytes": -1}, "max_bytes must not be negative, got -1"),
    ],
)
def test_bad_configurations_are_one_line(changes: dict, message: str):
    with pytest.raises(UserError, match=message):
        DataConfig(**changes)


def test_sources_from_the_command_line():
    assert SourceConfig.parse("docs/a=b") == SourceConfig("docs/a=b")
    assert SourceConfig.parse("docs=0.3") == SourceConfig("docs", 0.3)
    assert SourceConfig.parse("docs") == SourceConfig("docs", 1.0)
    for text, message in (("docs=0", "got 0.0"), ("docs=nan", "got nan"), ("=2", "empty path")):
        with pytest.raises(UserError, match=message):
            SourceConfig.parse(text)


def test_corpus_too_small_for_the_vocabulary(tmp_path: Path):
    root = write_source(tmp_path / "src", 4, count=12)
    config = DataConfig(
        sources=(SourceConfig(str(root)),), vocab_size=30_000, cache_dir=str(tmp_path / "cache")
    )
    with pytest.raises(UserError, match="vocab_size 30000 needs 29744 ranks, the text yields"):
        Loader(config)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
