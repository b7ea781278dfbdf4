"""What a `_target_` is and which arguments its constructor takes, read from source text: nothing is imported.

In: a dotted name, `package.module.Class` or Harbor's `package.module:Class`. Out: its `Constructor`, or a problem in
words. A login node without torch or Harbor can so check every component. Instantiating is left to rl360.engine.build.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal

from rl360.config.names import suggestion
from rl360.config.walk import fits_type

OWN_PREFIXES = ("rl360.", "launchers.")
_MAX_HOPS = 8  # re-exports and base classes followed before we give up and accept anything
_WITHOUT_KEYWORDS = ("Protocol", "object", "ABC")

# `async def`; `def`; `def` that returns what another call gives, which may be awaited; not to be told from the source.
Kind = Literal["async", "plain", "passed_on", "unknown"]

_SIMPLE_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


@dataclass(frozen=True, slots=True)
class Constructor:
    """The keyword arguments of one class. `annotations` holds source text; empty where there was none."""

    name: str
    annotations: Mapping[str, str]
    required: tuple[str, ...]
    accepts_any: bool = False  # **kwargs, or a base class that could not be read
    all_named: bool = True  # all base classes were read: what is not in `annotations` is taken by nobody that we know


@dataclass(frozen=True, slots=True)
class Methods:
    """What a class has by name."""

    kinds: Mapping[str, Kind]
    all_read: bool  # all that gives it methods was read: a name that is not there is not there


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


def methods(target: str) -> Methods:
    """The methods of a class and of its bases. Raises `TargetError`."""
    module, _, name = target.rpartition(":" if ":" in target else ".")
    return _methods_in(module, name, _MAX_HOPS)


def _methods_in(module: str, name: str, hops: int) -> Methods:
    node, module, hops = _found(module, name, hops)
    if node is None:
        return Methods({}, all_read=False)
    kinds: dict[str, Kind] = {}
    bases_read = True
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in _WITHOUT_KEYWORDS:
            continue
        found = _methods_of_base(base, module, hops)
        # One that cannot be read may have what a later one has, too.
        kinds = {**(found.kinds if bases_read else dict.fromkeys(found.kinds, "unknown")), **kinds}
        bases_read = bases_read and found.all_read
    own, body_read = _own_methods(node)
    added, none_added = _added_later(module, node.name)
    kinds |= {**own, **added}
    decorated = any("dataclass" not in ast.unparse(decorator) for decorator in node.decorator_list)
    all_read = bases_read and body_read and none_added and not decorated and not node.keywords
    return Methods(kinds, all_read and not {"__getattr__", "__getattribute__", "__new__"} & kinds.keys())


def _methods_of_base(base: ast.expr, module: str, hops: int) -> Methods:
    try:
        if isinstance(base, ast.Name):
            return _methods_in(module, base.id, hops - 1)
    except (TargetError, OSError, SyntaxError):
        pass
    return Methods({}, all_read=False)


def _own_methods(node: ast.ClassDef) -> tuple[dict[str, Kind], bool]:
    """Those of a class's own body, and whether nothing in it can give others."""
    kinds: dict[str, Kind] = {}
    all_read = True
    for statement in _statements(node.body):
        named: dict[str, Kind] = {}
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            named = {statement.name: _kind(statement)}
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            inner = (part for target in targets for part in ast.walk(target))
            named = {part.id: "unknown" for part in inner if isinstance(part, ast.Name)}
        elif isinstance(statement, ast.For | ast.With | ast.Import | ast.ImportFrom):
            all_read = False
        for name, kind in named.items():  # the same name in both branches of an if: either
            kinds[name] = kind if kinds.get(name, kind) == kind else "unknown"
    return kinds, all_read


def _kind(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Kind:
    if function.decorator_list:
        return "unknown"
    if isinstance(function, ast.AsyncFunctionDef):
        return "async"
    returned = [part.value for part in ast.walk(function) if isinstance(part, ast.Return)]
    calls = [ast.unparse(value.func).rpartition(".")[2] for value in returned if isinstance(value, ast.Call)]
    return "passed_on" if any(not called[:1].isupper() for called in calls) else "plain"  # a class gives its instance


def _added_later(module: str, name: str) -> tuple[dict[str, Kind], bool]:
    """Methods that a class is given below its body, and whether nothing else gives it any, as a call with it might."""
    added: dict[str, Kind] = {}
    none_else = True
    for part in ast.walk(source_of(module)):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _is_name(part.value, name):
            added[part.attr] = "unknown"
        elif isinstance(part, ast.Call) and any(_is_name(argument, name) for argument in part.args):
            none_else = False
    return added, none_else


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


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


def source_of(module: str) -> ast.Module:
    """A module's source. Raises `TargetError`, OSError and SyntaxError."""
    return _source(module)[0]


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
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _statements(handler.body)


def _class_in(module: str, name: str, hops: int) -> Constructor:
    node, module, hops = _found(module, name, hops)
    if node is None:
        return Constructor(name, {}, (), accepts_any=True, all_named=False)
    return _constructor_of(node, module, hops)


def _found(module: str, name: str, hops: int) -> tuple[ast.ClassDef | None, str, int]:
    """A class's source, its own module, and the hops that are left; None where there were too many."""
    if hops == 0:
        return None, module, 0
    tree, spec = _source(module)
    names = []
    failed: TargetError | None = None  # of `try: from .fast import X`, `except ImportError: class X`
    for statement in _statements(tree.body):
        try:
            if isinstance(statement, ast.ClassDef):
                if statement.name == name:
                    return statement, module, hops
                names.append(statement.name)
            elif isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name or alias.name == "*":
                        own = name if alias.name == "*" else alias.name
                        return _found(_absolute(statement, module, spec), own, hops - 1)
            elif isinstance(statement, ast.Assign) and any(_is_name(target, name) for target in statement.targets):
                if isinstance(statement.value, ast.Name):
                    return _found(module, statement.value.id, hops - 1)
                if isinstance(statement.value, ast.Call | ast.Attribute | ast.Subscript):
                    return None, module, hops  # made or taken from elsewhere: it may be anything
        except TargetError as error:
            failed = failed if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*" else error
    if any(isinstance(statement, ast.FunctionDef) and statement.name == "__getattr__" for statement in tree.body):
        return None, module, hops
    raise failed or TargetError(f"no class {name} in {module}{suggestion(name, names)}")


def _absolute(statement: ast.ImportFrom, module: str, spec: ModuleSpec) -> str:
    if not statement.level:
        return statement.module or ""
    package = module if spec.submodule_search_locations else module.rpartition(".")[0]
    for _ in range(statement.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{statement.module}" if statement.module else package


def _constructor_of(node: ast.ClassDef, module: str, hops: int) -> Constructor:
    bases = [base for base in node.bases if not (isinstance(base, ast.Name) and base.id in _WITHOUT_KEYWORDS)]
    methods = {s.name: s for s in _statements(node.body) if isinstance(s, ast.FunctionDef)}
    if "__init__" in methods:
        own = _from_init(node.name, methods["__init__"])
        if "__new__" in methods:  # may hand keywords to another class
            own = replace(own, all_named=False)
        return _with_bases(own, bases, module, hops) if own.accepts_any and bases else own
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return _from_dataclass(node)
    if node.decorator_list:  # may give it a constructor
        return Constructor(node.name, {}, (), accepts_any=True, all_named=False)
    for base in bases:  # the first that has one, behind mixins that have none
        found = _base(base, module, hops)
        if found is None:
            return Constructor(node.name, {}, (), accepts_any=True, all_named=False)
        if found.annotations or found.accepts_any:
            return replace(found, name=node.name, all_named=found.all_named and len(bases) == 1)
    return Constructor(node.name, {}, ())


def _base(base: ast.expr, module: str, hops: int) -> Constructor | None:
    """The constructor of a base class; None when it cannot be read."""
    if not isinstance(base, ast.Name):
        return None
    try:
        return _class_in(module, base.id, hops - 1)
    except (TargetError, OSError, SyntaxError):
        return None


def _with_bases(own: Constructor, bases: Iterable[ast.expr], module: str, hops: int) -> Constructor:
    """With what `**kwargs` hands on: the keywords of the base classes. It takes any others if one of them does."""
    found = [_base(base, module, hops) for base in bases]
    read = [one for one in found if one is not None]
    annotations = dict(own.annotations)
    required = list(own.required)
    for one in read:
        annotations = {**one.annotations, **annotations}
        required += [name for name in one.required if name not in own.annotations and not one.accepts_any]
    return Constructor(
        own.name,
        annotations,
        tuple(required),
        accepts_any=len(read) < len(found) or any(one.accepts_any for one in read),
        all_named=own.all_named and len(read) == len(found) and all(one.all_named for one in read),
    )


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
