"""Which 0-d states of an optimizer are one value for a group, and which belong to 0-d parameters?

Beside parameters with dims, a 0-d state is a count of steps or the like. Where all parameters of a
group are 0-d (a temperature that has a group of its own), only the name can tell.
"""

from __future__ import annotations

COUNTS = frozenset(("step", "mu_product", "eta", "mu"))
"""0-d states of torch's optimizers that aren't shaped as their parameter: counts of steps, NAdam's
``mu_product``, ASGD's ``eta`` and ``mu`` (torch 2.13, ``torch/optim/``)."""


def may_be_count(state: str, *, dims: bool) -> bool:
    """Whether a 0-d state can be one value for a group.

    Parameters
    ----------
    state
        Its name.
    dims
        Whether some parameter of the group has dims.
    """
    return dims or state in COUNTS
