"""What does the user's optimizer step?

One parameter for each piece: the run of a parameter that this rank owns, a view of the masters.
They lie in the user's groups, so that settings, schedulers, counters and the names of states are
those of plain torch. A piece has no shape, so only elementwise optimizers will do; others are
refused by name, and unknown ones are tried on a small example.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from reshard.engine.flat import Flat, Piece
from reshard.engine.holding import Holding
from reshard.engine.loose import Loose
from reshard.engine.state import Restored
from reshard.errors import RequestError, UnsupportedError

Factory = Callable[[list[dict[str, Any]]], Optimizer]
"""Makes an optimizer of parameter groups: ``lambda groups: AdamW(groups, lr=3e-4)``."""

Groups = Sequence[Mapping[str, Any]] | Callable[[Module], Sequence[Mapping[str, Any]]] | None
"""Groups as torch has them; ``params`` may also be names or patterns (``"*.bias"``)."""

_ELEMENTWISE = frozenset(
    [
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ]
)
_REFUSED = {
    "LBFGS": "it needs the whole gradient as one vector, and calls a closure",
    "Adafactor": "its second moments are the rows and columns of whole matrices",
    "Muon": "it orthogonalizes whole matrices",
    "SparseAdam": "it needs sparse gradients",
    "LAMB": "it scales by the norms of whole parameters",
    "LARS": "it scales by the norms of whole parameters",
    "Shampoo": "its preconditioners are those of whole matrices",
    "SOAP": "its preconditioners are those of whole matrices",
    "GaLore": "it projects whole matrices",
}


def resolve_groups(
    model: Module, groups: Groups
) -> tuple[list[dict[str, Any]], dict[Parameter, int]]:
    """Find the settings of the groups and the group of each parameter.

    Raises
    ------
    RequestError
        If a parameter is in two groups, a trained one in none, or a name fits nothing.
    """
    given = groups(model) if callable(groups) else groups
    if given is None:
        given = [{"params": list(model.parameters())}]
    names = dict(model.named_parameters(remove_duplicate=False))
    settings: list[dict[str, Any]] = []
    found: dict[Parameter, int] = {}
    for number, group in enumerate(given):
        settings.append({key: value for key, value in group.items() if key != "params"})
        for parameter in _members(names, group["params"], number):
            if found.setdefault(parameter, number) != number:
                name = next(n for n, p in names.items() if p is parameter)
                raise RequestError(
                    f"the parameter is in groups {found[parameter]} and {number}", where=name
                )
    missing = [n for n, p in names.items() if p.requires_grad and p not in found]
    if missing:
        raise RequestError(
            "trained parameters are in no group",
            where=", ".join(missing[:5]),
            hint="add them to a group, or freeze them with requires_grad_(False)",
        )
    return settings, found


def _members(names: Mapping[str, Parameter], given: Any, number: int) -> Iterator[Parameter]:
    known = set(names.values())
    for one in [given] if isinstance(given, str | Tensor) else given:
        if isinstance(one, tuple):  # named_parameters gives pairs
            one = one[1]
        if isinstance(one, str):
            fits = dict.fromkeys(p for n, p in names.items() if fnmatch.fnmatchcase(n, one))
            if not fits:
                raise RequestError(f"group {number}: no parameter fits {one!r}")
            yield from fits
        elif isinstance(one, Parameter) and one in known:
            yield one
        else:
            shape = tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__
            raise RequestError(f"group {number} holds what is no parameter of the model: {shape}")


class Pieces:
    """The optimizer and the parameters that it steps on this rank.

    Parameters
    ----------
    factory
        Makes the optimizer of groups.
    settings
        Of each group, without its parameters.
    holdings
        The trained flats.
    """

    def __init__(
        self, factory: Factory, settings: Sequence[dict[str, Any]], holdings: Iterable[Holding]
    ) -> None:
        self.of: dict[str, list[tuple[Piece, Parameter]]] = {}
        self.by_name: dict[str, Parameter] = {}
        groups: list[dict[str, Any]] = [{**setting, "params": []} for setting in settings]
        for holding in holdings:
            pairs = self.of[holding.flat.name] = []
            for piece in holding.pieces:
                entry = holding.flat.entries[piece.entry]
                parameter = Parameter(holding.own[piece.low : piece.high])
                pairs.append((piece, parameter))
                self.by_name[entry.name] = parameter
                groups[entry.group]["params"].append(parameter)
        try:
            self.optimizer = factory(groups)
        except (ValueError, TypeError, RuntimeError):
            _check(_example(factory, settings), factory, settings)
            raise
        _check(self.optimizer, factory, settings)
        self._check_groups(groups)

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        held = [[id(p) for p in g["params"]] for g in self.optimizer.param_groups]
        if held != [[id(p) for p in g["params"]] for g in groups]:
            raise RequestError(
                f"{type(self.optimizer).__name__} doesn't hold the parameters that it was given",
                hint="pass a function of the groups: lambda groups: AdamW(groups, lr=3e-4)",
            )

    def step(self, gradients: Mapping[str, tuple[Tensor | Loose, bytes]]) -> None:
        """Step once.

        Parameters
        ----------
        gradients
            Flat's name to the gradient of what this rank owns, and for each entry whether any
            rank had one. Where none had, ``.grad`` is ``None``, as in plain torch.
        """
        for name, pairs in self.of.items():
            gradient, seen = gradients[name]
            for piece, parameter in pairs:
                if seen[piece.entry]:
                    parameter.grad = gradient[piece.low : piece.high]
        self.optimizer.step()
        for pairs in self.of.values():
            for _, parameter in pairs:
                parameter.grad = None

    # -- what a checkpoint asks -------------------------------------------------------------------

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Settings of the groups, without their parameters."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def states(self, flat: Flat) -> dict[str, torch.dtype]:
        """The states that have an element for each element of a parameter, and their types."""
        found: dict[str, torch.dtype] = {}
        for _, parameter in self.of[flat.name]:
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if _elements(value, parameter):
                    found.setdefault(name, value.dtype)
        return found

    def parts(self, flat: Flat, state: str) -> list[tuple[int, Tensor]]:
        """A state's tensors with the element of the slice that each begins at."""
        return [
            (piece.low, self.optimizer.state[parameter][state])
            for piece, parameter in self.of[flat.name]
            if state in self.optimizer.state.get(parameter, {})
            and _elements(self.optimizer.state[parameter][state], parameter)
        ]

    def scalars(self, name: str) -> dict[str, Any] | None:
        """The states of a parameter that are one value; ``None`` if it has no state here."""
        parameter = self.by_name.get(name)
        state = None if parameter is None else self.optimizer.state.get(parameter)
        if not state:
            return None
        return {key: value for key, value in state.items() if not _elements(value, parameter)}

    def restore(self, restored: Restored) -> None:
        """Take groups and states; a parameter that isn't named has none."""
        for group, kept in zip(self.optimizer.param_groups, restored.groups, strict=False):
            group.update(kept)
        self.optimizer.state.clear()
        owners = {id(parameter): name for name, parameter in self.by_name.items()}
        for flat, pairs in self.of.items():
            slices = {k: v for k, v in restored.slices.get(flat, {}).items() if k != "master"}
            for piece, parameter in pairs:
                scalars = restored.scalars.get(owners[id(parameter)])
                if scalars is None:
                    continue
                state = self.optimizer.state[parameter]
                for key, values in slices.items():
                    state[key] = values[piece.low : piece.high].clone()
                state.update({k: _copy(v) for k, v in scalars.items()})


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _elements(value: Any, parameter: Tensor | None) -> bool:
    """Whether a state has an element for each of the parameter (a counter is 0-d)."""
    return isinstance(value, Tensor) and parameter is not None and value.shape == parameter.shape


def _check(optimizer: Any, factory: Factory, settings: Sequence[dict[str, Any]]) -> None:
    """Refuse an optimizer that needs whole parameters."""
    if not isinstance(optimizer, Optimizer):
        raise RequestError(
            f"the optimizer's function returned {type(optimizer).__name__}",
            hint="pass a function of the groups: lambda groups: AdamW(groups, lr=3e-4)",
        )
    kind = type(optimizer)
    for base in kind.__mro__:
        for name, why in _REFUSED.items():
            if base.__name__.lower() == name.lower():
                raise UnsupportedError(
                    f"{kind.__name__} can't be divided over ranks: {why}",
                    hint="the engine steps elementwise optimizers: Adam, AdamW, SGD, RMSprop, ...",
                )
    if kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE:
        return
    if not _acts_by_element(factory, settings):
        raise UnsupportedError(
            f"{kind.__name__} can't be divided over ranks: it moves a parameter otherwise when it "
            "gets it in two pieces",
            hint="the engine steps elementwise optimizers: Adam, AdamW, SGD, RMSprop, ...",
        )


def _example(factory: Factory, settings: Sequence[dict[str, Any]]) -> Any:
    """An optimizer of a small matrix: some refuse pieces before we can ask what they are."""
    groups: list[dict[str, Any]] = [{**s, "params": []} for s in settings]
    groups[0]["params"] = [Parameter(torch.zeros(2, 2))]
    return factory(groups)


def _acts_by_element(factory: Factory, settings: Sequence[dict[str, Any]]) -> bool:
    """Try an optimizer on a matrix, once whole and once in two pieces without its shape."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 5, generator=generator)
    gradients = [torch.randn(6, 5, generator=generator) for _ in range(3)]
    results: list[Tensor] = []
    for cuts in ([(0, 30)], [(0, 7), (7, 30)]):
        values = start.clone()
        whole = len(cuts) == 1
        flat = values.view(-1)
        pieces = [Parameter(values if whole else flat[a:b]) for a, b in cuts]
        groups: list[dict[str, Any]] = [{**s, "params": []} for s in settings]
        groups[0]["params"] = pieces
        optimizer = factory(groups)
        for gradient in gradients:
            for piece, (a, b) in zip(pieces, cuts, strict=True):
                piece.grad = gradient.clone() if whole else gradient.view(-1)[a:b].clone()
            optimizer.step()
        results.append(values)
    return torch.allclose(results[0], results[1], rtol=1e-5, atol=1e-7)
