"""`--set` on frozen dataclass trees: typed, one line per mistake."""

import re
from dataclasses import dataclass, field

import pytest

from k3 import UserError
from k3.recipes.overrides import override


@dataclass(frozen=True)
class Stage:
    context: int
    share: float


@dataclass(frozen=True)
class Inner:
    lr: float = 0.1
    heads: int = 2
    bound: float | None = -5.0
    fast: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    kinds: tuple[str, ...] = ("kda", "mla")

    def __post_init__(self) -> None:
        if self.heads == 3 and self.lr > 0.5:
            raise UserError(f"lr must be at most 0.5 with 3 heads, got {self.lr}")


@dataclass(frozen=True)
class Tree:
    name: str = "x"
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    stages: tuple[Stage, ...] = (Stage(256, 0.5), Stage(1024, 0.5))


@pytest.mark.parametrize(
    ("assignment", "read", "value"),
    [
        ("inner.lr=1e-3", lambda t: t.inner.lr, 1e-3),
        ("inner.lr=1", lambda t: t.inner.lr, 1.0),
        ("inner.heads=8", lambda t: t.inner.heads, 8),
        ("inner.bound=None", lambda t: t.inner.bound, None),
        ("inner.bound=none", lambda t: t.inner.bound, None),
        ("inner.bound=-3", lambda t: t.inner.bound, -3.0),
        ("inner.fast=true", lambda t: t.inner.fast, True),
        ("inner.fast = False", lambda t: t.inner.fast, False),
        ("inner.betas=0.8,0.9", lambda t: t.inner.betas, (0.8, 0.9)),
        ("inner.betas=(0.8, 0.9)", lambda t: t.inner.betas, (0.8, 0.9)),
        ("inner.kinds=kda,kda,mla", lambda t: t.inner.kinds, ("kda", "kda", "mla")),
        ("inner.kinds=mla", lambda t: t.inner.kinds, ("mla",)),
        ("name=1e-3", lambda t: t.name, "1e-3"),
        ("name=a=b", lambda t: t.name, "a=b"),
        ("maybe=(0.2, 4)", lambda t: t.maybe, Inner(0.2, 4)),
        ("stages=((64, 1.0),)", lambda t: t.stages, (Stage(64, 1.0),)),
        ("stages.1.context=4096", lambda t: t.stages[1], Stage(4096, 0.5)),
    ],
)
def test_values_take_the_type_of_their_field(assignment, read, value):
    before = Tree()
    after = override(before, [assignment])
    assert read(after) == value and type(read(after)) is type(value)
    assert before == Tree()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("inner.lrr=1", "--set inner.lrr: no such field; did you mean lr?"),
        ("inner.zzzz=1", "no such field; known: lr, heads, bound"),
        ("iner.lr=1", "did you mean inner?"),
        ("inner.lr=fast", "--set inner.lr: expected a number, got 'fast'"),
        ("inner.heads=1.5", "--set inner.heads: expected an integer, got '1.5'"),
        ("inner.heads=true", "expected an integer, got 'true'"),
        ("inner.heads=none", "expected an integer, got 'none'"),
        ("inner.fast=1", "--set inner.fast: expected true or false, got '1'"),
        ("inner.bound=low", "expected a number or none, got 'low'"),
        ("inner.betas=0.9", "expected a tuple of a number, a number, got '0.9'"),
        ("inner.betas=1,2,3", "expected a tuple"),
        ("inner.kinds=1,2", "expected a tuple of text, got '1,2'"),
        ("inner=3", "--set inner: expected (lr, heads"),
        ("maybe.lr=1", "--set maybe.lr: maybe is None, it has no fields"),
        ("inner.lr.x=1", "inner.lr is 0.1, it has no fields"),
        ("stages.2.context=1", "--set stages.2: expected an index below 2"),
        ("stages=((64, one),)", "--set stages: expected a tuple of (context, share)"),
        ("inner.lr", "--set inner.lr: expected field.field=value"),
        ("=1", "expected field.field=value"),
    ],
)
def test_a_mistake_is_one_line_with_field_and_value(assignment, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        override(Tree(), [assignment])
    assert "\n" not in str(caught.value)


def test_the_last_one_wins_and_joint_changes_are_checked_together():
    after = override(Tree(), ["inner.heads=3", "inner.lr=0.9", "inner.lr=0.4"])
    assert (after.inner.heads, after.inner.lr) == (3, 0.4)
    with pytest.raises(UserError, match=r"at most 0\.5 with 3 heads, got 0\.9"):
        override(Tree(), ["inner.heads=3", "inner.lr=0.9"])
    with pytest.raises(UserError, match="parts of inner are set"):
        override(Tree(), ["inner.lr=1", "inner=none"])


def test_nothing_to_set_is_the_same_tree():
    tree = Tree()
    assert override(tree, []) is tree
