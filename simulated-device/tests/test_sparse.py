"""Sparse tensors give what the CPU gives, with indices and values on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import simulated_device
import torch
from torch import Tensor, nn

MODES = ["eager", "late", "random"]


def embedding(device: str) -> nn.Embedding:
    weight = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    return nn.Embedding.from_pretrained(weight, freeze=False, sparse=True).to(device)


def gradient(device: str, count: int = 1) -> Tensor:
    """Return the sparse gradient of as many backward passes, of rows that differ."""
    table = embedding(device)
    scale = torch.arange(1.0, 10.0).view(3, 3).to(device)
    for _ in range(count):
        (table(torch.tensor([1, 2, 1], device=device)) * scale).sum().backward()
    assert table.weight.grad is not None
    return table.weight.grad


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors of the host have the same structure and values."""
    if not expected.is_sparse:
        return torch.equal(found, expected)
    structures = [(each.layout, each.shape, each.is_coalesced()) for each in (found, expected)]
    parts = [(found._indices(), expected._indices()), (found._values(), expected._values())]
    return structures[0] == structures[1] and all(torch.equal(*pair) for pair in parts)


def dense(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gradient": lambda x: x,
    "several gradients": lambda x: gradient(x.device.type, 3),
    "coalesce": lambda x: x.coalesce(),
    "to_dense": lambda x: x.to_dense(),
    "to_sparse": lambda x: x.to_dense().relu().to_sparse(),
    "part of to_sparse": lambda x: x.to_dense().to_sparse(1),
    "clone": lambda x: x.clone(),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "other type": lambda x: x.to(torch.bfloat16),
    "empty": lambda x: torch.empty(3, 4, layout=torch.sparse_coo, device=x.device),
    "zero_": lambda x: x.zero_(),
    "mul_": lambda x: x.mul_(2),
    "div": lambda x: x / 3,
    "add_": lambda x: x.add_(gradient(x.device.type).mul_(3)),
    "add": lambda x: x + x.clone(),
    "dense add_": lambda x: dense(x.device.type, 10, 3).add_(x, alpha=2),
    "copy_": lambda x: torch.zeros_like(x).copy_(x.mul_(2)),
    "copy from the host": lambda x: torch.zeros_like(x).copy_(gradient("cpu")),
    "matmul": lambda x: x.to_dense().to_sparse() @ dense(x.device.type, 3, 2),
    "norm": lambda x: x.coalesce().norm(),
    "sum": torch.sparse.sum,
    "select": lambda x: x[1],
    "isnan": lambda x: x.isnan(),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_what_the_cpus_give(name: str, mode: str):
    simulated_device.set_mode(mode, seed=1)  # type: ignore[arg-type]
    expected = OPERATIONS[name](gradient("cpu"))
    found = OPERATIONS[name](gradient("sim"))
    assert found.device.type == "sim"
    assert found.layout == expected.layout
    assert same(found.cpu(), expected)
    assert simulated_device.take_unordered_uses() == []


def test_a_gradient_tells_its_structure_without_a_wait():
    found = gradient("sim")
    simulated_device.take_host_waits()
    assert found.is_sparse
    assert found.layout == torch.sparse_coo
    assert (found.sparse_dim(), found.dense_dim(), found._nnz()) == (1, 1, 3)
    assert found._indices().device == found._values().device == found.device
    assert simulated_device.take_host_waits() == {}
    assert found._indices().tolist() == [[1, 2, 1]]


def test_a_tensor_is_made_of_indices_and_values():
    indices, values = torch.tensor([[0, 1], [1, 2]]), torch.tensor([1.0, 2.0])
    with torch.sparse.check_sparse_tensor_invariants():
        expected = torch.sparse_coo_tensor(indices, values, (3, 3))
        for parts in ((indices, values), (indices.to("sim"), values.to("sim"))):
            found = torch.sparse_coo_tensor(*parts, (3, 3), device="sim")
            assert found.device.type == "sim"
            assert same(found.cpu(), expected)
            assert same(expected.to("sim").cpu(), expected)
        with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
            torch.sparse_coo_tensor(indices, values, (2, 2), device="sim")


@pytest.mark.parametrize("name", ["div_", "mul_"])
def test_an_operator_in_place_keeps_or_replaces_the_values_as_on_the_cpu(name: str):
    found = {}
    for device in ("cpu", "sim"):
        tensor = gradient(device)
        values = tensor._values()
        getattr(tensor, name)(2)
        values.add_(1)  # part of the tensor, unless the operator gave it others
        found[device] = [tensor._values().cpu(), values.cpu()]
    assert torch.equal(found["sim"][0], found["sim"][1]) == (name == "div_")
    assert all(map(torch.equal, found["sim"], found["cpu"]))


def test_dense_and_sparse_tensors_are_not_copied_to_each_other():
    for target, source in ((torch.ones(10, 3, device="sim"), gradient("sim")),
                           (gradient("sim"), torch.ones(10, 3, device="sim"))):  # fmt: skip
        with pytest.raises(RuntimeError, match="between dense and sparse Tensors"):
            target.copy_(source)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_sparse_gradients_steps_as_on_the_cpu(name: str):
    weights = {}
    for device in ("cpu", "sim"):
        table = embedding(device)
        optimizer = OPTIMIZERS[name](table.parameters())
        for step in range(3):
            rows = torch.tensor([1, 2 + step, 1], device=device)
            table(rows).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights[device] = table.weight.detach().cpu()
    assert torch.equal(weights["sim"], weights["cpu"])


def test_operands_of_the_host_are_refused():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(10, 3, device="sim").add_(gradient("cpu"))
