"""Compares a plain mapping with a dataclass schema and names everything that does not fit.

In: what Hydra composed, as nested dicts and lists, and the schema class. Out: the part that fits, and one problem for
each key or value that does not. A value that does not fit is left out, so that the checks that follow still run on its
default and all problems come at once. Meaning (ranges, combinations, files) is left to the other checks.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from rl360.config.names import suggestion

MISSING_TEXT = "???"

_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class Walker:
    """One walk over one mapping; `problems` fills up.

    Args:
        owners: section -> its chosen option, for messages.
        schemas: section -> its schema, where that is another than the class's hint says.
        elsewhere: section -> key -> the option that has this key.
    """

    def __init__(
        self,
        owners: Mapping[str, str] | None = None,
        schemas: Mapping[str, type] | None = None,
        elsewhere: Mapping[str, Mapping[str, str]] | None = None,
    ):
        self.problems: list[str] = []
        self._owners = owners or {}
        self._schemas = schemas or {}
        self._elsewhere = elsewhere or {}

    def section(self, value: Any, schema: type, path: str = "") -> dict[str, Any]:
        """Return the keys of `value` that fit the dataclass `schema`. Keys left out keep the schema's default."""
        if not isinstance(value, Mapping):
            self._add(path, f"{_shown(value)}; expected a section with keys {', '.join(_field_names(schema))}")
            return {}
        hints = typing.get_type_hints(schema)
        fitting = {}
        for key, item in value.items():
            item_path = f"{path}.{key}" if path else str(key)
            if key not in hints:
                self._add(item_path, f"unknown key{self._hint(path, str(key), schema)}")
                continue
            fits, kept = self._value(item, hints[key], item_path)
            if fits:
                fitting[key] = kept
        return fitting

    def _hint(self, path: str, key: str, schema: type) -> str:
        owner = f" for {self._owners[path]}" if path in self._owners else ""
        near = suggestion(key, _field_names(schema))
        if near.startswith("; did you mean"):
            return f"{owner}{near}"
        others = self._elsewhere.get(path, {})
        if key in others:
            return f"{owner}; it belongs to {path}={others[key]}"
        if (other := suggestion(key, others)).startswith("; did you mean"):
            return f"{owner}{other} (of {path}={others[other.split()[-1].rstrip('?')]})"
        return f"{owner}{near}"

    def _add(self, path: str, text: str) -> None:
        self.problems.append(f"{path or 'config'}: {text}")

    def _value(self, value: Any, hint: Any, path: str) -> tuple[bool, Any]:
        hint = self._schemas.get(path, hint)
        if hint is Any:
            return True, value
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            options = [option for option in typing.get_args(hint) if option is not type(None)]
            if value is None:
                return True, None
            return self._value(value, options[0], path)  # schemas only use `X | None`
        if value == MISSING_TEXT:
            self._add(path, f"needs a value; expected {_expected(hint)}")
            return False, None
        if value is None:
            self._add(path, f"null is not allowed; expected {_expected(hint)}")
            return False, None
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            before = len(self.problems)
            kept = self.section(value, hint, path)
            return isinstance(value, Mapping) or len(self.problems) == before, kept
        origin = typing.get_origin(hint)
        if origin is list:
            return self._list(value, typing.get_args(hint)[0], path)
        if origin is dict:
            return self._dict(value, typing.get_args(hint)[1], path)
        if not fits_type(value, hint):
            self._add(path, f"{_shown(value)} is {_kind(value)}; expected {_expected(hint)}")
            return False, None
        return True, value

    def _list(self, value: Any, item_hint: Any, path: str) -> tuple[bool, Any]:
        if not isinstance(value, list):
            self._add(path, f"{_shown(value)} is {_kind(value)}; expected a list, such as [a, b]")
            return False, None
        items = [self._value(item, item_hint, f"{path}[{i}]") for i, item in enumerate(value)]
        return all(fits for fits, _ in items), [kept for _, kept in items]

    def _dict(self, value: Any, item_hint: Any, path: str) -> tuple[bool, Any]:
        if not isinstance(value, Mapping):
            self._add(path, f"{_shown(value)} is {_kind(value)}; expected named entries, such as {{name: value}}")
            return False, None
        kept = {}
        for key, item in value.items():
            fits, kept_item = self._value(item, item_hint, f"{path}.{key}")
            if fits:
                kept[str(key)] = kept_item
        return True, kept


def fits_type(value: Any, hint: type) -> bool:
    """Whether a YAML scalar may stand for `hint`. A whole number fits a float; a number fits text; NaN fits nothing."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str | int | float) and not isinstance(value, bool)
    return isinstance(value, hint)


def _field_names(schema: type) -> list[str]:
    return [f.name for f in dataclasses.fields(schema)]


def _expected(hint: Any) -> str:
    if hint in _TYPE_WORDS:
        return _TYPE_WORDS[hint]
    if dataclasses.is_dataclass(hint):
        return "a section"
    return {list: "a list", dict: "named entries"}.get(typing.get_origin(hint) or hint, str(hint))


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list"}.get(
        type(value), type(value).__name__
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
