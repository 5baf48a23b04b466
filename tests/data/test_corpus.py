"""What is kept, what is held out, and one hash for it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from k3 import UserError
from k3.data.corpus import Corpus, read_corpora, read_corpus, texts


def prose(seed: int, lines: int = 40) -> str:
    draw = random.Random(seed)
    return "".join(
        " ".join(f"w{draw.randrange(10**6)}" for _ in range(draw.randrange(4, 14))) + "\n"
        for _ in range(lines)
    )


def write_folder(root: Path, count: int = 200, order: int = 0) -> Path:
    numbers = list(range(count))
    random.Random(order).shuffle(numbers)
    for number in numbers:
        place = root / f"part{number % 7}" / f"{number}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(prose(number), encoding="utf-8")
    return root


def paths(documents) -> list[str]:
    return [document.path for document in documents]


def kept(corpus: Corpus) -> set[str]:
    return {*paths(corpus.train), *paths(corpus.validation)}


def test_the_hash_knows_content_and_name_but_not_place_or_order(tmp_path: Path):
    first = read_corpus(str(write_folder(tmp_path / "a")))
    again = read_corpus(str(write_folder(tmp_path / "b", order=1)))
    assert first.sha256 == again.sha256 and paths(first.train) == paths(again.train)
    assert first.sha256[:16] in first.describe() and "\n" not in first.describe()
    victim = next(document.path for document in first.train)
    (tmp_path / "b" / victim).write_text("other " + prose(0))
    assert read_corpus(str(tmp_path / "b")).sha256 != first.sha256
    (tmp_path / "b" / victim).write_bytes((tmp_path / "a" / victim).read_bytes())
    (tmp_path / "b" / victim).rename(tmp_path / "b" / "renamed.txt")
    assert read_corpus(str(tmp_path / "b")).sha256 != first.sha256


def test_split_is_stable_when_files_come(tmp_path: Path):
    root = write_folder(tmp_path, 400)
    before = read_corpus(str(root))
    assert 1 <= len(before.validation) <= 20
    assert not set(paths(before.train)) & set(paths(before.validation))
    write_folder(root, 440)
    after = read_corpus(str(root))
    assert set(paths(before.validation)) <= set(paths(after.validation))
    assert set(paths(before.train)) <= set(paths(after.train))


def test_a_smaller_limit_takes_a_subset_and_the_same_held_out(tmp_path: Path):
    root = str(write_folder(tmp_path))
    whole, half, little = (read_corpus(root, max_bytes=limit) for limit in (0, 200_000, 50_000))
    assert paths(half.train) == paths(whole.train)[: len(half.train)]
    assert paths(little.train) == paths(half.train)[: len(little.train)]
    assert 200_000 <= half.train_bytes < 210_000
    assert whole.validation == half.validation == little.validation
    assert len({whole.sha256, half.sha256, little.sha256}) == 3


def test_held_out_documents_stay_within_their_limit(tmp_path: Path):
    root = write_folder(tmp_path, 600)
    everything = read_corpus(str(root))
    big = root / everything.validation[0].path
    big.write_text(prose(999, lines=900))
    limited = read_corpus(str(root), val_bytes=16_000)
    assert paths(limited.validation)[0] != big.relative_to(root).as_posix()
    assert 12_000 < limited.validation_bytes < 20_000
    # Documents set aside but not used are not trained on.
    assert not set(paths(everything.validation)) & set(paths(limited.train))


def test_what_is_left_out_is_counted(tmp_path: Path):
    root = write_folder(tmp_path)
    (root / "binary").write_bytes(b"text then\0zero" * 50)
    (root / "latin1.txt").write_bytes("é".encode("latin-1") * 50)
    (root / "empty.txt").write_bytes(b"")
    (root / "blank.txt").write_bytes(b" \n\n\t\n")
    (root / "copy.txt").write_text(prose(3))
    (root / "respaced.txt").write_text(prose(4).replace("\n", "  \r\n\n"))
    corpus = read_corpus(str(root))
    assert corpus.skipped == {"binary": 2, "empty": 2, "duplicate": 2, "near_duplicate": 0}
    assert len(kept(corpus)) == 200


@pytest.mark.parametrize(("changed", "dropped"), [(10, True), (30, False)])
def test_near_duplicates_go_by_their_long_lines(tmp_path: Path, changed: int, dropped: bool):
    root = write_folder(tmp_path)
    text = "".join(f"a long enough line that only this pair has, number {i}\n" for i in range(40))
    (root / "near1.txt").write_text(text + prose(1001, 1))
    (root / "near2.txt").write_text(text.replace("only", "just", changed) + prose(1002, 1))
    corpus = read_corpus(str(root))
    assert corpus.skipped["near_duplicate"] == dropped
    # Short lines alone ("}", "return x") make no document a near-duplicate.
    (root / "short1.txt").write_text("a b c\nd e f\n" * 20 + "one")
    (root / "short2.txt").write_text("a b c\nd e f\n" * 20 + "two")
    assert {"short1.txt", "short2.txt"} <= kept(read_corpus(str(root)))


def test_training_never_repeats_a_held_out_document(tmp_path: Path):
    root = write_folder(tmp_path)
    held_out = read_corpus(str(root)).validation[0]
    copy = held_out.read().decode() + "and one more line of its own\n"
    for name in ("0.txt", "zz.txt", "part1/copy.txt", "b.txt"):
        (root / name).write_text(copy)
    corpus = read_corpus(str(root))
    assert held_out.path in paths(corpus.validation)
    assert corpus.skipped["near_duplicate"] == 4


def test_no_source_trains_on_what_another_holds_out(tmp_path: Path):
    first, second = write_folder(tmp_path / "a"), write_folder(tmp_path / "b", 300)
    # Under other names, so that the split by path does not agree: apart, they leak.
    for path in list(second.rglob("*.txt")):
        path.rename(path.with_suffix(".text"))

    def leaks(one: Corpus, other: Corpus) -> set[str]:
        return {d.sha256 for d in one.train} & {d.sha256 for d in other.validation}

    alone, apart = read_corpus(str(first)), read_corpus(str(second))
    assert leaks(alone, apart) and leaks(apart, alone)
    one, other = read_corpora([str(first), str(second)])
    assert not leaks(one, other) and not leaks(other, one)
    assert one.validation == alone.validation
    # The documents that both have are read once.
    contents = [d.sha256 for c in (one, other) for d in (*c.train, *c.validation)]
    assert len(contents) == len(set(contents)) == 300


def test_two_documents_are_enough_and_one_is_not(tmp_path: Path):
    (tmp_path / "one.txt").write_text(prose(1, 200))
    with pytest.raises(UserError, match=r"too small: \d+ bytes .* 0 training and 1 held-out"):
        read_corpus(str(tmp_path))
    (tmp_path / "two.txt").write_text(prose(2, 200))
    corpus = read_corpus(str(tmp_path))
    assert len(corpus.train) == len(corpus.validation) == 1
    (tmp_path / "one.txt").write_text("tiny")
    (tmp_path / "two.txt").write_text("small")
    with pytest.raises(UserError, match="too small: 9 bytes .* needed 10000"):
        read_corpus(str(tmp_path))
    with pytest.raises(UserError, match="too small: 0 bytes"):
        (tmp_path / "none").mkdir()
        read_corpus(str(tmp_path / "none"))


def test_export_reads_back_with_the_same_hash(tmp_path: Path):
    root = str(write_folder(tmp_path / "folder"))
    corpus = read_corpus(root, max_bytes=100_000, val_bytes=5_000)
    corpus.export(tmp_path / "corpus.jsonl")
    again = read_corpus(str(tmp_path / "corpus.jsonl"), max_bytes=100_000, val_bytes=5_000)
    assert again.sha256 == corpus.sha256
    assert list(texts(again.train)) == list(texts(corpus.train))


def test_a_file_that_changes_meanwhile_is_named(tmp_path: Path):
    corpus = read_corpus(str(write_folder(tmp_path)))
    place = tmp_path / corpus.train[0].path
    place.write_text(place.read_text()[:-2] + "!\n")  # the same length
    with pytest.raises(UserError, match=f"{corpus.train[0].path}: changed while it was read"):
        list(texts(corpus.train))


def test_an_export_that_fails_leaves_nothing(tmp_path: Path):
    corpus = read_corpus(str(write_folder(tmp_path / "folder")))
    with pytest.raises(UserError, match="none/corpus.jsonl: cannot be written"):
        corpus.export(tmp_path / "none" / "corpus.jsonl")
    (tmp_path / "taken.jsonl").mkdir()
    with pytest.raises(UserError, match="taken.jsonl: cannot be written"):
        corpus.export(tmp_path / "taken.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "taken.jsonl"]


def test_the_default_corpus_is_the_same_on_every_machine():
    try:
        corpus = read_corpus("default", max_bytes=2_000_000, val_bytes=262_144)
    except UserError as error:
        pytest.skip(str(error))
    # Changes only with a pin of k3/constraints.txt or with a rule of what is kept.
    assert corpus.sha256[:16] == "7f826b8ec0505c20", corpus.describe()


def test_progress_is_told(tmp_path: Path):
    told: list[tuple[str, int, int]] = []
    read_corpus(str(write_folder(tmp_path)), progress=lambda *args: told.append(args))
    assert told and all(what == "read" and 0 < done <= total for what, done, total in told)
