"""Which parameters travel together?

By default each child of a ``ModuleList`` or ``Sequential`` that has parameters is a unit, and the
root unit has the rest. A parameter belongs to the innermost unit that holds it; a tied one, to
the first unit that meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from reshard.errors import RequestError

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

UnitRule = (
    Literal["auto", "root"] | Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
)
"""``"auto"``, ``"root"`` (one unit), names or classes of modules, or a function that picks them."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A module and the parameters that are gathered, reduced and released together.

    Parameters
    ----------
    name
        The module's name; ``""`` is the root.
    module
        The module whose run needs them.
    parameters
        Names and parameters, in the order of registration, each once.
    """

    name: str
    module: Module
    parameters: tuple[tuple[str, Parameter], ...]

    @property
    def label(self) -> str:
        """The name, or ``root``."""
        return self.name or "root"


def units(model: Module, rule: UnitRule = "auto") -> tuple[Unit, ...]:
    """Divide a model's parameters into units: the root first, then in order of registration.

    Raises
    ------
    RequestError
        If the rule names what the model doesn't have.
    """
    modules = dict(model.named_modules())
    heads = ["", *(name for name in _heads(model, modules, rule) if name)]
    held: dict[str, list[tuple[str, Parameter]]] = {name: [] for name in heads}
    seen: set[Parameter] = set()
    for name, module in modules.items():
        owner = next(head for head in _ancestors(name) if head in held)
        for key, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                held[owner].append((f"{name}.{key}" if name else key, parameter))
    return tuple(
        Unit(name, modules[name], tuple(held[name])) for name in heads if held[name] or not name
    )


def _ancestors(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _heads(model: Module, modules: dict[str, Module], rule: UnitRule) -> list[str]:
    if rule == "auto":
        return list(_children_of_lists(model, ""))
    if rule == "root":
        return []
    if callable(rule):
        return [name for name, module in modules.items() if rule(name, module)]
    if isinstance(rule, str):
        raise RequestError(
            f"units={rule!r} is no rule",
            hint='give "auto", "root", names or classes of modules, or a function',
        )
    names = {part for part in rule if isinstance(part, str)}
    kinds = tuple(part for part in rule if isinstance(part, type))
    found = [n for n, module in modules.items() if n in names or isinstance(module, kinds)]
    missing = [repr(n) for n in sorted(names - modules.keys())]
    missing += [k.__name__ for k in kinds if not any(isinstance(m, k) for m in modules.values())]
    if missing:
        raise RequestError(f"units names modules that the model doesn't have: {', '.join(missing)}")
    return found


def _children_of_lists(module: Module, prefix: str) -> Iterator[str]:
    """Outermost first: what is inside a unit isn't divided again."""
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if isinstance(module, nn.ModuleList | nn.Sequential):
            if next(child.parameters(), None) is not None:
                yield name
        else:
            yield from _children_of_lists(child, f"{name}.")
