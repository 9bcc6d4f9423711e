"""What are tensors called in the target?

Rules change the names of a manifest before anything is planned: what wrappers of modules add is
taken out, then each rule's matches are replaced, in the order of the rules. Two tensors must not
come to one name. The script's own state keeps its names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.errors import RequestError
from reshard.layout import CLIENT, Entry, FlatSpace
from reshard.manifest import Manifest
from reshard.stored import brief

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that DistributedDataParallel, torch.compile, FSDP1 and activation checkpointing
add, anywhere in a name."""

_KEPT = ("client", "per_rank", "scheduler", "step")  # state of the script: not names of tensors
_WRAPPED = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(WRAPPERS)})\.")


@dataclass(frozen=True, slots=True)
class Rule:
    r"""Replace what a pattern finds in names.

    Parameters
    ----------
    pattern
        A regular expression.
    replacement
        What comes in its place; ``\1`` is the first group.

    Raises
    ------
    RequestError
        If one of them isn't valid.
    """

    pattern: str
    replacement: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern).sub(
                self.replacement, ""
            )  # looks at both, also without a match
        except (re.error, IndexError) as error:
            raise RequestError(
                f"the rule {self} isn't valid: {error}",
                hint="the left side is a Python regular expression, the right one what replaces it",
            ) from error

    def __str__(self) -> str:
        return f"{self.pattern}={self.replacement}"

    def apply(self, name: str) -> str:
        """The new name."""
        return re.sub(self.pattern, self.replacement, name)


def unwrapped(name: str) -> str:
    """A name without what wrappers add."""
    return _WRAPPED.sub("", name)


def renamed(manifest: Manifest, rules: Sequence[Rule], *, unwrap: bool = False) -> Manifest:
    """A manifest of the same bytes under other names.

    Parameters
    ----------
    manifest
        The source.
    rules
        Applied in this order, after the wrappers' names are gone.
    unwrap
        Whether to take those out.

    Raises
    ------
    RequestError
        If two tensors would have one name, a name would be empty, or a rule finds nothing.
    """
    if not rules and not unwrap:
        return manifest
    own = [name for name, state in manifest.tensors if state != CLIENT]
    old = list(dict.fromkeys([*own, *manifest.aliases]))
    new = _applied(manifest, old, rules, unwrap)
    _refuse_collisions(manifest, new)

    def of(name: str, state: str) -> str:
        return name if state == CLIENT else new[name]

    layout = manifest.layout
    spaces = tuple(_space(space, of) for space in layout.spaces)
    return replace(
        manifest,
        layout=replace(layout, spaces=spaces),
        aliases={new[a]: new.get(n, n) for a, n in manifest.aliases.items()},
        digests={(of(n, s), s): d for (n, s), d in manifest.digests.items()},
        objects={k: v if k in _KEPT else _inside(v, new) for k, v in manifest.objects.items()},
    )


def _applied(
    manifest: Manifest, names: Sequence[str], rules: Sequence[Rule], unwrap: bool
) -> dict[str, str]:
    new = {name: unwrapped(name) if unwrap else name for name in names}
    for rule in rules:
        after = {name: rule.apply(now) for name, now in new.items()}
        if after == new:
            raise RequestError(
                f"the rule {rule} changes no name",
                where=manifest.root,
                hint=f"names look like {brief(next(iter(new.values()), ''))}",
            )
        new = after
    if empty := [name for name, now in new.items() if not now and name]:
        raise RequestError(f"nothing would be left of the name {empty[0]}", where=manifest.root)
    return new


def _refuse_collisions(manifest: Manifest, new: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for name, now in new.items():
        if first.setdefault(now, name) != name:
            raise RequestError(
                f"{first[now]} and {name} would both be called {now}", where=manifest.root
            )


def _space(space: FlatSpace, of: Callable[[str, str], str]) -> FlatSpace:
    state = next(iter(space.states))
    entries = tuple(Entry(of(e.name, state), e.shape, e.box) for e in space.entries)
    return space if entries == space.entries else replace(space, entries=entries)


def _inside(value: Any, new: Mapping[str, str]) -> Any:
    """Names of tensors inside a format's own state (lists of buffers, of a group's members)."""
    if type(value) is str:
        return new.get(value, value)
    if isinstance(value, Mapping):
        return {_inside(k, new): _inside(v, new) for k, v in value.items()}
    if type(value) is list:
        return [_inside(one, new) for one in value]
    if type(value) is tuple:
        return tuple(_inside(one, new) for one in value)
    return value
