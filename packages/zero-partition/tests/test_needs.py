"""What an optimizer needs, by its own word, by ours, or by trial."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode
from zero_comm.testing import equal
from zero_partition import ChainedOptimizer, Cut, PartitionError, StateError
from zero_partition.optimizer.watch import StepWatch
from zero_partition.planning import choose_cuts


class _Optimizer(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = [0]

    @torch.no_grad()
    def step(self) -> None:
        self.calls[0] += 1
        for group in self.param_groups:
            grads = [param.grad for param in group["params"] if param.grad is not None]
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.update(param, grads), alpha=-group["lr"])

    def update(self, param: Tensor, grads: list[Tensor]) -> Tensor:
        raise NotImplementedError


def _kind(name: str, update: Callable[[Any, Tensor, list[Tensor]], Tensor]) -> type[_Optimizer]:
    return type(name, (_Optimizer,), {"update": update})


class _StateFromTheStart(_Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for param in self.param_groups[0]["params"]:
            self.state[param]["sum"] = torch.full_like(param, 0.1)

    def update(self, param: Tensor, grads: list[Tensor]) -> Tensor:
        self.state[param]["sum"].add_(param.grad**2)
        return param.grad / self.state[param]["sum"].sqrt()


class _NeedsAClosure(_Optimizer):
    def step(self, closure) -> None:
        closure()


class _SubclassOfAdamW(torch.optim.AdamW):
    pass


def _block_max(_: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    blocks = param.grad.reshape(-1, 8)
    return (blocks / blocks.abs().amax(dim=1, keepdim=True)).view_as(param)


def _only_large_factored(_: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    is_factored = param.dim() == 2 and min(param.shape) >= 128
    return param.grad * param.grad.mean(dim=0) if is_factored else param.grad


def _only_matrices(_: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    if param.dim() != 2:
        raise ValueError("matrices only")
    return param.grad @ param.grad.T @ param.grad


_Sign = _kind("Sign", lambda _, param, grads: param.grad.sign() * param.abs())
_RowNorm = _kind("RowNorm", lambda _, p, grads: p.grad / p.grad.norm(dim=-1, keepdim=True))
_TensorNorm = _kind("TensorNorm", lambda _, p, grads: p.grad * p.norm() / p.grad.norm())
_GlobalNorm = _kind("GlobalNorm", lambda _, p, grads: p.grad / sum(g.norm() for g in grads))
_Random = _kind("Random", lambda _, param, grads: torch.rand_like(param))
CUTS = ("flat", "row", "block(8)", "tensor")
FINEST = {  # the cuts under which each is right
    _Sign: {*CUTS},
    _StateFromTheStart: {*CUTS},
    _SubclassOfAdamW: {*CUTS},
    _RowNorm: {"row", "tensor"},
    _kind("BlockMax", _block_max): {"row", "block(8)", "tensor"},  # a row is some whole blocks
    _TensorNorm: {"tensor"},
    _kind("FirstElement", lambda _, p, grads: p.grad / p.grad.view(-1)[0]): {"tensor"},
    _kind("OnlyMatrices", _only_matrices): {"tensor"},
    _kind("OnlyLargeFactored", _only_large_factored): {"tensor"},
    _GlobalNorm: set(),
    _Random: set(),
    _NeedsAClosure: set(),
}


@pytest.mark.parametrize("kind", FINEST, ids=lambda kind: kind.__name__)
def test_a_trial_finds_which_cuts_are_right(kind: type[_Optimizer]) -> None:
    """Nobody can list all optimizers; what one looks at shows in what it does."""
    model = nn.Linear(200, 160, bias=False)
    optimizer = kind(model.parameters(), lr=1e-9)
    for cut in CUTS:
        if cut in FINEST[kind]:
            assert choose_cuts(model, optimizer, cut) == {id(model.weight): Cut.parse(cut)}
        else:
            with pytest.raises(PartitionError, match=f"{kind.__name__} cannot work on shards"):
                choose_cuts(model, optimizer, cut)


def _counts_in_group(optimizer: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    group = optimizer.param_groups[0]
    group["seen"] = group.get("seen", 0.0) + param.grad.abs().sum().item()
    return param.grad


def _stacked_norms(_: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    norms = torch.stack(torch._foreach_norm(grads)).clamp(min=1e-3)
    index = next(index for index, grad in enumerate(grads) if grad is param.grad)
    return param.grad / norms.unbind()[index]


def _clips_from_the_fifth_step(optimizer: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    return param.grad / norm if optimizer.calls[0] >= 5 else param.grad


def _clips_later(optimizer: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    norm = torch.stack([grad.norm() for grad in grads]).norm() if optimizer.calls[0] > 500 else 1
    return param.grad / norm


def _trusts_later(optimizer: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    state = optimizer.state[param]
    state["step"] = state.get("step", torch.tensor(0.0)) + 1
    return param.grad / param.grad.norm() if state["step"] > 2000 else param.grad


def _centres_rows_later(optimizer: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    group = optimizer.param_groups[0]
    group["num"] = group.get("num", 0) + (param is group["params"][0])
    means = param.grad.mean(dim=-1, keepdim=True) if group["num"] > 50_000 else 0.0
    return param.grad - means


def _waits(optimizer: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    return param.grad * (optimizer.calls[0] > 10)


def _keeps_a_function(optimizer: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    return optimizer.state[param].setdefault("last", lambda grad: grad)(param.grad)


def _differentiates(_: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    with torch.enable_grad():
        return torch.autograd.grad(param.grad.sum(), param)[0]


def _sums_blocks(_: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    blocks = param.grad.view(-1, 16)
    return (blocks - blocks.mean(dim=-1, keepdim=True)).view_as(param)


_zero_times = lambda _, p, grads: p.grad + 0.0 * p.norm()  # noqa: E731
ALONE = {  # the cut that each gets by itself; None: there is none
    _Sign: "flat",
    _StateFromTheStart: "flat",
    _RowNorm: "row",
    _kind("BlockMeans", _sums_blocks): "block(16)",
    _TensorNorm: "tensor",
    _kind("ANormThatDidNotMatter", _zero_times): "tensor",
    _kind("StackedNorms", _stacked_norms): "tensor",
    _kind("OnlyMatricesAlone", _only_matrices): "tensor",
    _kind("TrustsFromStep2000", _trusts_later): "tensor",
    _kind("CentresRowsFromStep50000", _centres_rows_later): "row",
    _kind("WaitsTenSteps", _waits): "flat",
    _kind("ClipsFromStep500", _clips_later): None,
    _kind("KeepsAFunction", _keeps_a_function): None,
    _kind("Differentiates", _differentiates): None,
    _kind("ClipsFromTheFifthStep", _clips_from_the_fifth_step): None,
    _kind("CountsInItsGroup", _counts_in_group): None,
    _GlobalNorm: None,
    _Random: None,
}


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.__name__)
def test_without_a_word_the_cut_is_the_smallest_that_will_do(kind: type[_Optimizer]) -> None:
    """What a step's operators combine stays together, whether or not the result mattered."""
    model = nn.Linear(200, 160, bias=False)
    if (cut := ALONE[kind]) is not None:
        assert choose_cuts(model, kind(model.parameters()), None) == {
            id(model.weight): Cut.parse(cut)
        }
        return
    model = nn.Sequential(nn.Linear(200, 160), nn.Linear(160, 30))
    reasons = "combines values of several|writes param_groups.*'seen'|looks at elements|is random"
    reasons += "|neither saved nor sent: 'last': .*a function|differentiates gradients again"
    with pytest.raises(PartitionError, match=f"cannot work on shards: .*({reasons})"):
        choose_cuts(model, kind(model.parameters()), None)


def test_a_trial_touches_nothing_of_the_users() -> None:
    """It runs before the first step of a run that must be repeatable."""
    model = nn.Linear(8, 8)
    optimizer = _Sign(model.parameters())
    StepLR(optimizer, 1)  # replaces optimizer.step by a method of its own
    model(torch.ones(1, 8)).sum().backward()
    before = [param.detach().clone() for param in model.parameters()]
    grads = [param.grad for param in model.parameters()]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)

    choose_cuts(model, optimizer, None)

    assert equal(torch.rand(4), expected)
    assert all(map(equal, before, model.parameters()))
    assert all(a is b.grad for a, b in zip(grads, model.parameters(), strict=True))
    assert optimizer.calls == [0]
    assert not optimizer.state
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == list(map(id, model.parameters()))


@pytest.mark.parametrize(
    ("word", "expected"),
    [("flat", Cut.FLAT), (Cut.ROW, Cut.ROW), (lambda group: group["kind"], Cut.TENSOR)],
    ids=["text", "cut", "by-group"],
)
def test_the_optimizers_own_word_counts(word: Any, expected: Cut) -> None:
    """Its author knows better than a trial, which a random one would fail."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = _Random([{"params": model.parameters(), "kind": "tensor"}])
    optimizer.needs_cut = word

    assert choose_cuts(model, optimizer, None) == {id(model.weight): expected}


class _Closing(torch.optim.SGD):
    """Evaluates the loss in its step, as SAM does."""

    def step(self, closure: Any) -> None:
        closure()
        super().step()


class _ClosingByDefault(torch.optim.SGD):
    """Has torch's signature, and calls it all the same, as most public implementations of SAM."""

    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        super().step()


@pytest.mark.parametrize(
    ("kind", "word", "is_doubted"),
    [
        (_Closing, "flat", True),
        (_Closing, "tensor", False),
        (_ClosingByDefault, "flat", True),
        (_ClosingByDefault, "row", True),
        (_ClosingByDefault, "tensor", False),
        (torch.optim.SGD, "flat", False),
        (torch.optim.LBFGS, "flat", True),
    ],
)
def test_the_word_of_who_wants_a_closure_is_followed_and_doubted(
    kind: type[torch.optim.Optimizer],
    word: str,
    is_doubted: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SAM trained something else in silence."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = type("_Worded", (kind,), {"needs_cut": word})(model.parameters(), lr=0.1)

    cuts = choose_cuts(model, optimizer, None)

    assert str(cuts[id(model.weight)]) == word
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("taken at its word" in line for line in said) == is_doubted


class _Guarded(torch.optim.SGD):
    """Calls it where there is one; holds the model, and writes to it."""

    needs_cut = "flat"
    model: nn.Module

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for param in self.model.parameters():
            param.data.mul_(0)
        return loss


def test_who_says_what_it_needs_is_not_run(caplog: pytest.LogCaptureFixture) -> None:
    """A copy of it holds the user's model as well; its code says whether it wants a closure."""
    model = nn.Linear(4, 4)
    before = model.weight.clone()
    optimizer = _Guarded(model.parameters(), lr=0.1)
    optimizer.model = model

    choose_cuts(model, optimizer, None)

    assert equal(model.weight, before) and not caplog.records


def test_the_doubt_names_the_cut_that_is_doubted(caplog: pytest.LogCaptureFixture) -> None:
    """Of param groups some may need whole tensors, which are safe."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kind = type("_ByGroup", (_Closing,), {"needs_cut": lambda self, group: group["kind"]})
    groups = zip(model, ("row", "tensor"), strict=True)
    optimizer = kind([{"params": m.parameters(), "kind": k} for m, k in groups], lr=0.1)

    choose_cuts(model, optimizer, None)

    assert "needs_cut='row'" in caplog.text


class _Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.numel = max(self.numel, result.numel())
        return result


def test_a_trial_copies_neither_the_model_nor_its_state() -> None:
    """A model that fits is sharded anew in the memory that there is."""
    model = nn.Linear(500, 500)
    optimizer = _kind("_Plain", lambda self, param, grads: param.grad)(model.parameters())
    for param in model.parameters():
        optimizer.state[param]["average"] = torch.zeros_like(param)
    with _Largest() as largest:
        choose_cuts(model, optimizer, None)
    assert 0 < largest.numel < 500 * 500


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor])
def test_torchs_own_are_known(kind: type[torch.optim.Optimizer]) -> None:
    """A list of exact classes: what a subclass overrides nobody knows."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = kind(model.parameters())

    assert choose_cuts(model, optimizer, None) == {id(model.weight): Cut.TENSOR}
    with pytest.raises(PartitionError, match=f"{kind.__name__} needs the cut 'tensor'.*'row'"):
        choose_cuts(model, optimizer, "row")


# ---- Chained optimizers ----


def _pair() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    muon = torch.optim.Muon([model[0].weight, model[1].weight], lr=0.02)
    adamw = torch.optim.AdamW([model[0].bias, model[1].bias], lr=0.1)
    return model, muon, adamw


def test_a_chain_steps_as_its_optimizers_do() -> None:
    """Schedulers of one and of all go on working, and state goes out and in again."""
    plain, *optimizers = _pair()
    model, *members = _pair()
    chain = ChainedOptimizer(*members)
    StepLR(chain, 1)  # torch replaces chain.step
    schedulers = [StepLR(each, 1, gamma=0.5) for each in (optimizers[0], members[0])]
    for step in range(4):
        for net, steppers in ((plain, optimizers), (model, [chain])):
            net(torch.full((2, 6), float(step))).square().sum().backward()
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        if step == 1:
            chain.load_state_dict(chain.state_dict())

    assert all(map(equal, plain.parameters(), model.parameters()))
    assert len(chain.state) == 4
    cuts = choose_cuts(model, chain, None)
    assert [str(cuts[id(param)]) for param in model.parameters()] == ["tensor", "flat"] * 2


def test_a_chain_is_stepped_as_a_whole() -> None:
    """A member alone would step on gradients that nobody has reduced."""
    _, muon, adamw = _pair()
    chain = ChainedOptimizer(muon, adamw)

    with pytest.raises(StateError, match=r"Muon\.step\(\) was called.*of the ChainedOptimizer"):
        muon.step()
    with pytest.raises(StateError, match=r"Call add_param_group\(\) of that one"):
        chain.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(StateError, match=re.escape("expected the states of 2 optimizers, got ['p")):
        chain.load_state_dict(adamw.state_dict())
    with pytest.raises(ValueError, match="in param groups of two of these"):
        ChainedOptimizer(muon, torch.optim.SGD(muon.param_groups[0]["params"], lr=0.1))
    with pytest.raises(PartitionError, match=r"expected one or more torch optimizers, got \[\]"):
        ChainedOptimizer()


# ---- Who decides ----


def test_a_choice_may_be_by_name_by_pattern_by_function_or_by_param_group() -> None:
    """Embeddings, matrices and the rest often want something else each; a name counts first."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def by_dims(name: str, param: nn.Parameter) -> str | None:
        return "row" if param.dim() > 1 and name.startswith("0.") else None

    def cuts_of(choice: Any, *of_groups: str) -> list[str]:
        entries = [{"params": [param]} for param in model.parameters()]
        for entry, cut in zip(entries, of_groups, strict=False):
            entry["cut"] = cut
        found = choose_cuts(model, torch.optim.SGD(entries), choice)
        return [str(found[id(param)]) for param in model.parameters()]

    assert cuts_of({"0.weight": "row", "*.weight": "tensor"}) == ["row", "flat", "tensor", "flat"]
    assert cuts_of(by_dims) == ["row", "flat", "flat", "flat"]
    assert cuts_of({"0.*": "row"}, *["tensor"] * 3) == ["row", "row", "tensor", "flat"]
    for choice, of_groups, says in (
        (
            {"layers.*": "row"},
            (),
            r"cut: 'layers\.\*' matches no parameter; see model\.named_param",
        ),
        (None, ("whole",), "'cut' in param group 0 of the SGD: expected a Cut, or 'flat'"),
    ):
        with pytest.raises(PartitionError, match=says):
            cuts_of(choice, *of_groups)


def test_the_watch_follows_slices_whose_defaults_torch_leaves_out() -> None:
    """The second of two stacked parameters is looked at whole, and the first is not."""
    watch, tensors = StepWatch(), [torch.ones(8), torch.ones(8)]
    for number, tensor in enumerate(tensors):
        watch.follow(number, tensor)
    with watch:
        torch.ops.aten.slice(torch.stack(tensors), 0, 1).square().sum()
    assert watch.grains.get(1, 1) == 8
    assert watch.grains.get(0, 1) == 1
