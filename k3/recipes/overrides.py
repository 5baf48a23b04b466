"""`--set a.b=1` on a tree of frozen dataclasses, typed by the fields themselves.

A value is read as a Python literal (`1e-3`, `true`, `none`, `(1, 2)`, `kda,mla`), then fitted to
the type of its field. All overrides are gathered first and each dataclass is rebuilt once, so that
fields which are only valid together can be set together.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from k3 import UserError

Tree = TypeVar("Tree")
WORDS = {"true": True, "false": False, "none": None, "null": None}


def override(tree: Tree, assignments: Sequence[str]) -> Tree:
    """`tree` with `field.field=value` applied; the last of two for one field wins.

    UserError in one line for an unknown field (with the closest known one), a value of the wrong
    type, a field inside one that is None, an index outside a tuple, and whatever the dataclass
    itself refuses.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise UserError(f"--set {assignment}: expected field.field=value")
        _insert(changes, path.strip(), text.strip(), assignment)
    return typing.cast(Tree, _rebuild(tree, changes, "")) if changes else tree


@dataclasses.dataclass
class _Leaf:
    text: str


def _insert(changes: dict[str, Any], path: str, text: str, assignment: str) -> None:
    *parents, last = path.split(".")
    for name in parents:
        inner = changes.setdefault(name, {})
        if isinstance(inner, _Leaf):
            raise UserError(f"--set {assignment}: {name} is set whole by another --set")
        changes = inner
    if isinstance(changes.get(last), dict):
        raise UserError(f"--set {assignment}: parts of {last} are set by another --set")
    changes[last] = _Leaf(text)


def _rebuild(node: Any, changes: dict[str, Any], path: str) -> Any:
    if isinstance(node, tuple):
        return _rebuild_tuple(node, changes, path)
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        raise UserError(f"--set {path}.{next(iter(changes))}: {path} is {node!r}, it has no fields")
    hints = typing.get_type_hints(type(node))
    known = [field.name for field in dataclasses.fields(node)]
    fresh = {}
    for name, change in changes.items():
        where = f"{path}.{name}" if path else name
        if name not in known:
            raise UserError(f"--set {where}: no such field{_closest(name, known)}")
        if isinstance(change, _Leaf):
            fresh[name] = _value(change.text, hints[name], where)
        else:
            fresh[name] = _rebuild(getattr(node, name), change, where)
    return dataclasses.replace(node, **fresh)


def _rebuild_tuple(node: tuple[Any, ...], changes: dict[str, Any], path: str) -> tuple[Any, ...]:
    items = list(node)
    for name, change in changes.items():
        if not name.isdigit() or int(name) >= len(items):
            raise UserError(f"--set {path}.{name}: expected an index below {len(items)}")
        index, where = int(name), f"{path}.{name}"
        if isinstance(change, _Leaf):
            items[index] = _value(change.text, type(items[index]), where)
        else:
            items[index] = _rebuild(items[index], change, where)
    return tuple(items)


def _closest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def _value(text: str, kind: Any, where: str) -> Any:
    """The text as a value of type `kind`."""
    try:
        return _fit(_parse(text, kind), kind)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--set {where}: expected {_spell(kind)}, got {text!r}") from None


def _parse(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if "," in text and _accepts_tuple(kind):
        return tuple(_parse(part.strip(), None) for part in text.split(",") if part.strip())
    return text


def _accepts_tuple(kind: Any) -> bool:
    return any(typing.get_origin(option) is tuple for option in _options(kind))


def _options(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def _fit(value: Any, kind: Any) -> Any:
    """`value` as `kind`; TypeError where it is not one (no number becomes a bool, no string a
    number).
    """
    options = _options(kind)
    if len(options) > 1:
        refusal: Exception = TypeError()
        for option in options:
            try:
                return _fit(value, option)
            except UserError as error:
                refusal = error
            except TypeError:
                continue
        raise refusal
    if kind is Any:
        return value
    if kind is None or kind is type(None):
        return _only(value is None, value)
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return _only(value in typing.get_args(kind), value)
    if origin is tuple:
        return _fit_tuple(value, typing.get_args(kind))
    if origin in (dict, Mapping):
        return _only(isinstance(value, dict), value)
    if dataclasses.is_dataclass(kind):
        return _fit_dataclass(value, kind)
    if kind is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(_only(number, value))
    if kind is Path:
        return Path(_only(isinstance(value, str), value))
    return _only(type(value) is kind, value)


def _only(holds: bool, value: Any) -> Any:
    if not holds:
        raise TypeError
    return value


def _fit_tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        items = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(_fit(item, kinds[0]) for item in items)
    _only(isinstance(value, (tuple, list)) and len(value) == len(kinds), value)
    return tuple(_fit(item, kind) for item, kind in zip(value, kinds, strict=True))


def _fit_dataclass(value: Any, kind: Any) -> Any:
    """A tuple of the fields in order, or a dict by name: `stages=((256, 0.6), (1024, 0.4))`."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    if isinstance(value, (tuple, list)) and len(value) <= len(names):
        value = dict(zip(names, value, strict=False))
    _only(isinstance(value, dict) and set(value) <= set(names), value)
    return kind(**{name: _fit(item, hints[name]) for name, item in value.items()})


def _spell(kind: Any) -> str:
    options = _options(kind)
    if len(options) > 1:
        return " or ".join(_spell(option) for option in options)
    if kind is type(None):
        return "none"
    if dataclasses.is_dataclass(kind):
        fields = ", ".join(field.name for field in dataclasses.fields(kind))
        return f"({fields})"
    if typing.get_origin(kind) is tuple:
        inner = [_spell(arg) for arg in typing.get_args(kind) if arg is not Ellipsis]
        return f"a tuple of {', '.join(inner)}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, str(kind))
