"""Is the public API still the one that users wrote their code against?

Names, signatures and public members of everything in ``reshard.__all__`` stand as text in
``public_api.txt``. A change shows up as a difference of that file, to be made on purpose:
``python tests/test_public_api.py`` writes it anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
FROZEN = Path(__file__).resolve().with_name("public_api.txt")
HEAD = "# The public API: names, signatures and members of reshard.__all__.\n"


def _signature(function: Any) -> str:
    """A signature without quotes and without the text of defaults that are made anew."""
    signature = inspect.signature(function)
    parts, star = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        text = parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {_type(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        parts.append(text)
    returned = signature.return_annotation
    ending = "" if returned is signature.empty else f" -> {_type(returned)}"
    return f"({', '.join(parts)}){ending}"


def _type(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "?")


def _default(value: object) -> str:
    made = type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS" or callable(value)
    return "..." if made else repr(value)


def _members(kind: type) -> Iterator[str]:
    """Public fields, properties and methods of a class, and the special methods that it defines."""
    fields = {f.name: f for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    for name, field in fields.items():
        yield f"    {name}: {_type(field.type)}{_field_default(field)}"
    for name in sorted({n for n in dir(kind) if not n.startswith("_")} | _special(kind)):
        if name in fields:
            continue
        owner = next(c for c in kind.__mro__ if name in vars(c))
        if owner.__module__.partition(".")[0] != "reshard":
            continue
        value = vars(owner)[name]
        if isinstance(value, property):
            assert value.fget is not None
            yield f"    {name}: {_type(inspect.signature(value.fget).return_annotation)}"
        elif hasattr(value, "func"):  # cached_property
            yield f"    {name}: {_type(inspect.signature(value.func).return_annotation)}"
        elif isinstance(value, classmethod):
            yield f"    classmethod {name}{_signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"    def {name}{_signature(value)}"
        elif not inspect.ismemberdescriptor(value):
            yield f"    {name} = {value!r}"


def _field_default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return " = ..."
    return "" if field.default is dataclasses.MISSING else f" = {_default(field.default)}"


def _special(kind: type) -> set[str]:
    """What makes it a mapping, a sequence or an array."""
    wanted = {"__getitem__", "__iter__", "__len__", "__array__", "__contains__", "__call__"}
    return {n for n in wanted if any(n in vars(c) for c in kind.__mro__)}


def api() -> str:
    """The public API as text."""
    import reshard

    lines = [HEAD]
    for name in sorted(reshard.__all__):
        value = getattr(reshard, name)
        if isinstance(value, type):
            bases = [b.__name__ for b in value.__bases__ if b is not object]
            lines.append(f"class {name}{'(' + ', '.join(bases) + ')' if bases else ''}")
            if not dataclasses.is_dataclass(value):
                lines.append(f"    def __init__{_signature(value.__init__)}")
            lines += _members(value)
        elif callable(value):
            lines.append(f"def {name}{_signature(value)}")
        else:
            lines.append(f"{name}: {type(value).__name__}")
        lines.append("")
    return "\n".join(lines)


def test_the_public_api_is_as_it_was() -> None:
    assert api() == FROZEN.read_text(encoding="utf-8"), (
        "the public API has changed; if that is meant, run: python tests/test_public_api.py, and "
        "say so in CHANGELOG.md"
    )


def test_what_is_public_is_documented() -> None:
    import reshard

    for name in reshard.__all__:
        value = getattr(reshard, name)
        if not callable(value):
            continue
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"
        for member, inner in vars(value).items() if isinstance(value, type) else ():
            if inspect.isfunction(inner) and not member.startswith("_"):
                assert (inner.__doc__ or "").strip(), f"{name}.{member} has no docstring"


ORDERS = """
import importlib, sys, types

def fresh():
    for name in [n for n in sys.modules if n.partition(".")[0] == "reshard"]:
        del sys.modules[name]
    return importlib.import_module("reshard")

everything = fresh().__all__
for first in ["open", "Wanted", "Report", "Manifest", "reshard.conversion", "reshard.plan"]:
    reshard = fresh()
    if "." in first:
        importlib.import_module(first)
    else:
        getattr(reshard, first)
    for name in everything:
        value = getattr(reshard, name)
        assert not isinstance(value, types.ModuleType), (
            f"after {first}, reshard.{name} is the module {value.__name__}")
        assert getattr(value, "__name__", name) == name, (first, name, value)
"""


def test_every_name_is_itself_whatever_comes_first() -> None:
    """A module of the same name must not take a function's place when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", ORDERS], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    import reshard

    assert not hasattr(reshard, "no_such_name")
    assert dir(reshard) == sorted(reshard.__all__)


if __name__ == "__main__":
    sys.path.insert(0, str(REPO))
    FROZEN.write_text(api(), encoding="utf-8")
