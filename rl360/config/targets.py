"""What a `_target_` is and which arguments its constructor takes, read from source text: nothing is imported.

In: a dotted name, `package.module.Class` or Harbor's `package.module:Class`. Out: its `Constructor`, or a problem in
words. A login node without torch or Harbor can so check every component. Instantiating is left to rl360.engine.build.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from rl360.config.names import suggestion
from rl360.config.walk import fits_type

OWN_PREFIXES = ("rl360.", "launchers.")
_MAX_HOPS = 8  # re-exports and base classes followed before we give up and accept anything

_SIMPLE_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


@dataclass(frozen=True, slots=True)
class Constructor:
    """The keyword arguments of one class. `annotations` holds source text; empty where there was none."""

    name: str
    annotations: Mapping[str, str]
    required: tuple[str, ...]
    accepts_any: bool = False  # **kwargs, or a base class that could not be read


class TargetError(Exception):
    """The target cannot be used; the text says why and what to try."""


def allowed(target: str, extra_prefixes: Iterable[str]) -> bool:
    """Whether a config may name this target: ours, or under a module that `allow_targets` lists."""
    prefixes = [*OWN_PREFIXES, *(p.rstrip(".") + "." for p in extra_prefixes)]
    return target.replace(":", ".").startswith(tuple(prefixes))


def constructor(target: str) -> Constructor:
    """Find the class in source and return its constructor. Raises `TargetError`."""
    module, _, name = target.rpartition(":" if ":" in target else ".")
    if not module or not name:
        raise TargetError(f"{target!r} is not module.Class")
    return _class_in(module, name, _MAX_HOPS)


def argument_problems(target: Constructor, given: Mapping[str, Any], provided: Iterable[str]) -> list[str]:
    """Problems of the arguments `given`, as `key: text`, when `provided` are passed by the framework besides."""
    provided = set(provided)
    problems = []
    if not target.accepts_any:
        for key in given:
            if key not in target.annotations:
                known = [name for name in target.annotations if name not in provided]
                problems.append(f"{key}: unknown key for {target.name}{suggestion(key, known)}")
    for key, value in given.items():
        if (problem := _type_problem(value, target.annotations.get(key, ""))) is not None:
            problems.append(f"{key}: {problem}")
    for key in target.required:
        if key not in given and key not in provided:
            problems.append(f"{key}: {target.name} needs a value for it")
    return problems


def _type_problem(value: Any, annotation: str) -> str | None:
    options = [part.strip() for part in annotation.split("|")]
    if not annotation or any(option not in _SIMPLE_TYPES and option != "None" for option in options):
        return None  # only plain scalars are compared; the constructor judges the rest
    if value is None:
        return None if "None" in options else f"null is not allowed; expected {annotation}"
    if any(fits_type(value, _SIMPLE_TYPES[option]) for option in options if option != "None"):
        return None
    return f"{value!r}; expected {annotation}"


def _source(module: str) -> tuple[ast.Module, ModuleSpec]:
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError) as error:
        raise TargetError(f"module {top} cannot be found ({error})") from error
    name = top
    for part in rest:
        parent, name = spec, f"{name}.{part}"
        locations = parent.submodule_search_locations if parent else None
        # By its last part: the whole name of a folder without __init__.py makes the finder look for imported parents.
        spec = PathFinder.find_spec(part, locations) if locations else None
        if spec is None:
            siblings = [p.stem for where in locations or () for p in Path(where).glob("*.py")]
            raise TargetError(f"no module {name}{suggestion(part, [s for s in siblings if s[0] != '_'])}")
    if spec is None:
        raise TargetError(f"no module {module}; is the package that has it installed?")
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise TargetError(f"module {module} has no Python source to read the arguments from")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8")), spec


def _statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)


def _class_in(module: str, name: str, hops: int) -> Constructor:
    if hops == 0:
        return Constructor(name, {}, (), accepts_any=True)
    tree, spec = _source(module)
    names = []
    for statement in _statements(tree.body):
        if isinstance(statement, ast.ClassDef):
            if statement.name == name:
                return _constructor_of(statement, module, tree, spec, hops)
            names.append(statement.name)
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return _class_in(_absolute(statement, module, spec), alias.name, hops - 1)
    raise TargetError(f"no class {name} in {module}{suggestion(name, names)}")


def _absolute(statement: ast.ImportFrom, module: str, spec: ModuleSpec) -> str:
    if not statement.level:
        return statement.module or ""
    package = module if spec.submodule_search_locations else module.rpartition(".")[0]
    for _ in range(statement.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{statement.module}" if statement.module else package


def _constructor_of(node: ast.ClassDef, module: str, tree: ast.Module, spec: ModuleSpec, hops: int) -> Constructor:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            own = _from_init(node.name, statement)
            return _with_base(own, node, module, hops) if own.accepts_any else own
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return _from_dataclass(node)
    for base in node.bases:
        if not isinstance(base, ast.Name) or base.id in ("Protocol", "object", "ABC"):
            continue
        try:
            found = _class_in(module, base.id, hops - 1)
        except (TargetError, OSError, SyntaxError):
            return Constructor(node.name, {}, (), accepts_any=True)
        return Constructor(node.name, found.annotations, found.required, found.accepts_any)
    return Constructor(node.name, {}, (), accepts_any=bool(node.bases))


def _with_base(own: Constructor, node: ast.ClassDef, module: str, hops: int) -> Constructor:
    """What `**kwargs` hands on: the keywords of the first base class, when that is one of ours and takes no others."""
    base = node.bases[0] if node.bases else None
    if not isinstance(base, ast.Name):
        return own
    try:
        found = _class_in(module, base.id, hops - 1)
    except (TargetError, OSError, SyntaxError):
        return own
    if found.accepts_any:
        return own
    required = [*own.required, *(name for name in found.required if name not in own.annotations)]
    return Constructor(own.name, {**found.annotations, **own.annotations}, tuple(required))


def _from_init(name: str, init: ast.FunctionDef) -> Constructor:
    arguments = init.args
    positional = [*arguments.posonlyargs, *arguments.args][1:]  # without self
    without_default = positional[: len(positional) - len(arguments.defaults)]
    keyword_required = [
        a for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    annotations = {
        a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in [*positional, *arguments.kwonlyargs]
    }
    required = tuple(a.arg for a in [*without_default, *keyword_required])
    return Constructor(name, annotations, required, accepts_any=arguments.kwarg is not None)


def _from_dataclass(node: ast.ClassDef) -> Constructor:
    fields = [s for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
    annotations = {s.target.id: ast.unparse(s.annotation) for s in fields if isinstance(s.target, ast.Name)}
    required = tuple(s.target.id for s in fields if s.value is None and isinstance(s.target, ast.Name))
    return Constructor(node.name, annotations, required, accepts_any=bool(node.bases))
