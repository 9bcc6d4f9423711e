"""Can a released parameter be read by anybody, at any time, without a crash?

Also: what happens to what is written, copied, printed, and to views that outlive a release.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import Odd, over, tokens, two_groups
from ranks import run_ranks
from torch import nn
from torch.optim import SGD

from reshard.engine import ParameterWrittenError, Precision, ZeroEngine
from reshard.engine.released import Released
from reshard.errors import RequestError


def make(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd()


def engine_of(model: nn.Module, stage: int = 3, **more: Any) -> ZeroEngine:
    return ZeroEngine(model, lambda groups: SGD(groups, lr=0.1), stage=stage, **more)


def train_a_step(engine: ZeroEngine) -> None:
    rank, P = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    engine.backward(engine(tokens(P)[rank]))
    engine.step()


def bytes_of(engine: ZeroEngine) -> int:
    return sum(h.storage.nbytes() for h in engine._core.holdings)


def read_everything() -> None:
    model, plain = make(), make()
    before = dict(model.named_parameters())  # taken before the engine was made
    optimizer = SGD(model.parameters(), lr=1.0)
    values = {n: p.detach().clone() for n, p in plain.named_parameters()}
    engine = engine_of(model)
    assert bytes_of(engine) == 0
    for name, p in before.items():
        assert isinstance(p, Released) and isinstance(p, nn.Parameter)
        assert p is model.get_parameter(name)
        assert p.shape == values[name].shape and p.numel() == values[name].numel()
        assert p.dtype == torch.float32 and p.is_leaf and p.grad is None
        assert str(tuple(p.shape)) in repr(p)
        assert isinstance(p, Released), "a question of shape gathered it"
        assert torch.equal(p, values[name])
        assert p.sum() == values[name].sum()
        assert p.tolist() == values[name].tolist()
        assert torch.equal(p.data, values[name])
        assert (p + 1).sum() == (values[name] + 1).sum()
        assert bytes_of(engine) == 0, "what was read has stayed"
    norms = [p.norm() for p in model.parameters() if p.numel()]
    assert norms == [p.norm() for p in plain.parameters() if p.numel()]
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()),
                       nn.utils.parameters_to_vector(plain.parameters()))  # fmt: skip
    print(model, list(model.parameters()))
    optimizer.step()  # no gradients: nothing to do
    optimizer.zero_grad()
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    del state
    residency: Any = engine._core.residency
    residency.settle()
    assert bytes_of(engine) == 0
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file), strict=True)


def test_every_read() -> None:
    run_ranks(read_everything, 2)


def views_outlive_a_release() -> None:
    model = make()
    engine = engine_of(model)
    views = {n: p.detach() for n, p in model.named_parameters()}
    copies = {n: v.clone() for n, v in views.items()}
    rank = dist.get_rank()
    if rank:  # only one rank goes on looking
        views.clear()
    engine.backward(engine(tokens(2)[rank]))
    for name, view in views.items():
        assert torch.equal(view, copies[name]), name
    engine.step()
    train_a_step(engine)
    assert all(view.isfinite().all() for view in views.values())
    views.clear()
    view = None
    residency: Any = engine._core.residency
    residency.settle()
    assert bytes_of(engine) == 0


def test_a_view_outlives_the_release() -> None:
    run_ranks(views_outlive_a_release, 2)


def copies_are_plain() -> None:
    model = make()
    engine = engine_of(model)
    train_a_step(engine)
    expected = engine.full_state_dict()
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.embed))):
        assert all(type(p) is nn.Parameter for p in made.parameters())
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embed.weight
    for name, value in copied.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert bytes_of(engine) == 0
    copied(tokens(1)[0]).backward()  # a plain model: no unit of the engine is gathered for it
    assert bytes_of(engine) == 0
    assert copied.embed.weight.grad is not None


def test_a_deep_copy_is_a_plain_model() -> None:
    run_ranks(copies_are_plain, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_write_is_not_lost_in_silence(stage: int) -> None:
    model = make()
    engine = engine_of(model, stage)

    def write() -> None:
        with torch.no_grad():
            model.never.add_(1)
        train_a_step(engine)

    with pytest.raises(ParameterWrittenError, match="never"):
        write()


def test_a_moved_model_is_refused() -> None:
    model = make()
    engine = engine_of(model, 2)
    model.double()
    with pytest.raises(ParameterWrittenError, match="before the engine is made"):
        train_a_step(engine)


def gathered_reads_and_writes(stage: int) -> None:
    rank = dist.get_rank()
    model: Any = make()
    engine = engine_of(model, stage, groups=two_groups)
    train_a_step(engine)
    before = engine.full_state_dict()
    with engine.gathered():
        for name, p in model.named_parameters():
            assert type(p) is nn.Parameter and torch.equal(p, before[name])
    with engine.gathered("blocks.1", write="rank0"), torch.no_grad():
        if rank == 0:
            model.blocks[1].up.weight.fill_(3)
            model.blocks[1].fixed.data.fill_(4)
    with engine.gathered([model.embed, model.never], write="all"), torch.no_grad():
        model.embed.weight.mul_(2)
        model.never.zero_()
    after = engine.full_state_dict()
    changed = {n for n in after if not torch.equal(before[n], after[n])}
    assert changed == {"blocks.1.up.weight", "blocks.1.fixed", "embed.weight", "head.weight",
                       "never"}  # fmt: skip
    assert (after["blocks.1.up.weight"] == 3).all() and (after["blocks.1.fixed"] == 4).all()
    assert torch.equal(after["embed.weight"], before["embed.weight"] * 2)
    train_a_step(engine)  # the step starts from what was written
    stepped = engine.full_state_dict()
    assert (stepped["blocks.1.up.weight"] - 3).abs().max() < 0.5
    reading = engine.gathered("never")
    with pytest.raises(ParameterWrittenError, match="gathered"), reading, torch.no_grad():
        model.never.fill_(1)
    with pytest.raises(ZeroDivisionError), engine.gathered(write="all"):
        raise ZeroDivisionError
    train_a_step(engine)
    with pytest.raises(RequestError, match="no parameter or module 'nothing'"):
        engine.gathered("nothing").__enter__()
    if stage == 3:
        assert bytes_of(engine) == 0


def test_gathered() -> None:
    run_ranks(over, 2, gathered_reads_and_writes, [0, 1, 2, 3])


def one_rank_reads() -> str:
    model: Any = make()
    engine = engine_of(model)
    if dist.get_rank() == 0:
        print(model.embed.weight)  # what it says needs no gather
        try:
            model.blocks[2].up.weight.sum()
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
    else:
        try:
            engine(tokens(1)[0])
            dist.barrier()
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
    return "nothing was said"


def test_a_read_on_one_rank_alone_is_named() -> None:
    for said in run_ranks(one_rank_reads, 2):
        assert "Rank" in said and "blocks.2" in said, said


def written_past_everything(stage: int) -> list[str]:
    """Writes through .data, which no version counter tells of."""
    said = []
    for narrow in (False, True):
        model: Any = make()
        precision = Precision(param=torch.bfloat16) if narrow else None
        engine = engine_of(model, stage, precision=precision)
        train_a_step(engine)
        assert model.embed.weight.data.sum().isfinite()  # reading is fine
        train_a_step(engine)
        try:
            model.embed.weight.data.mul_(2)
            train_a_step(engine)
        except ParameterWrittenError as error:
            said.append(str(error))
    return said


def test_a_write_through_data_is_told() -> None:
    for said in run_ranks(written_past_everything, 2, 3):
        assert len(said) == 2 and all("through .data" in text for text in said), said
