"""What differs between kernels of the CPU and of other devices: cells, norms, and types."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import simulated_device
import torch
from torch import Tensor, nn
from torch.nn import functional

MODES = ["eager", "late", "random"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors_of(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in tensors_of(each)]  # type: ignore[attr-defined]


def run_on(
    device: str, module: nn.Module, inputs: Tensor, call: Callable = lambda module, x: module(x)
) -> list[Tensor]:
    """Return results, gradients of inputs and parameters, and buffers."""
    module = copy.deepcopy(module).to(device)
    inputs = inputs.to(device, copy=True).requires_grad_()
    results = tensors_of(call(module, inputs))
    torch.stack([result.float().square().sum() for result in results]).sum().backward()
    gradients = [tensor.grad for tensor in (inputs, *module.parameters())]
    found = [*results, *gradients, *module.buffers()]
    assert all(tensor.device.type == device for tensor in found)
    return [tensor.detach().cpu() for tensor in found]


def check_is_the_cpus(found: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    assert len(found) == len(expected) > 0
    for result, oracle in zip(found, expected, strict=True):
        torch.testing.assert_close(result, oracle, **tolerance)
    assert simulated_device.take_unordered_uses() == []


# ---- recurrent cells

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 5),
    "LSTM, both directions": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True),
    "LSTM without bias": lambda: nn.LSTM(4, 5, bias=False),
    "LSTM with projections": lambda: nn.LSTM(4, 5, proj_size=3),
    "GRU": lambda: nn.GRU(4, 5, num_layers=2),
    "GRU without bias": lambda: nn.GRU(4, 5, bias=False),
    "RNN": lambda: nn.RNN(4, 5),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_recurrent_network_trains_as_on_the_cpu(name: str, mode: str):
    network, inputs = NETWORKS[name](), normal(3, 2, 4)
    expected = run_on("cpu", network, inputs)
    simulated_device.set_mode(mode, seed=1)  # type: ignore[arg-type]
    check_is_the_cpus(run_on("sim", network, inputs), expected)


def twice(cell: nn.Module, inputs: Tensor) -> object:
    return cell(inputs, cell(inputs))


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell])
def test_a_recurrent_cell_trains_as_on_the_cpu(make: type[nn.Module]):
    cell, inputs = make(4, 5), normal(3, 4)
    check_is_the_cpus(run_on("sim", cell, inputs, twice), run_on("cpu", cell, inputs, twice))


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_recurrent_cell_of_16_bits_is_the_cpus_but_for_rounding(
    make: type[nn.Module], dtype: torch.dtype
):
    cell, inputs = make(4, 5).to(dtype), normal(3, 4).to(dtype)
    found, expected = (run_on(device, cell, inputs, twice) for device in ("sim", "cpu"))
    check_is_the_cpus(found, expected, rtol=2**-4, atol=2**-4)


def through_packed_sequences(network: nn.Module, inputs: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([3, 1]))
    return nn.utils.rnn.pad_packed_sequence(network(packed)[0])[0]


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_a_recurrent_network_takes_packed_sequences(make: type[nn.Module]):
    network, inputs = make(4, 5), normal(3, 2, 4)
    found = run_on("sim", network, inputs, through_packed_sequences)
    check_is_the_cpus(found, run_on("cpu", network, inputs, through_packed_sequences))


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_a_recurrent_network_does_not_block_the_host(make: type[nn.Module]):
    network, inputs = make(4, 5).to("sim"), normal(3, 2, 4).to("sim")
    simulated_device.take_host_waits()
    network(inputs)[0].sum().backward()
    assert simulated_device.take_host_waits() == {}


# ---- batch norm


def batch_norm(dtype: torch.dtype, is_training: bool, has_weights: bool = True) -> nn.Module:
    norm = nn.BatchNorm1d(5, affine=has_weights)
    norm.running_mean.add_(0.3)
    norm.running_var.add_(0.5)
    return norm.to(dtype).train(is_training)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_batch_norm_in_float32_takes_inputs_of_any_type(
    dtype: torch.dtype, is_training: bool, mode: str
):
    inputs = normal(3, 5, 4).to(dtype)
    for has_weights in (True, False):
        norm = batch_norm(torch.float32, is_training, has_weights)
        expected = run_on("cpu", norm, inputs)
        simulated_device.set_mode(mode, seed=1)  # type: ignore[arg-type]
        check_is_the_cpus(run_on("sim", norm, inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_of_16_bits_is_the_cpus_but_for_rounding(dtype: torch.dtype, is_training: bool):
    inputs = normal(3, 5, 4).to(dtype)
    for has_weights in (True, False):
        norm = batch_norm(dtype, is_training, has_weights)
        exact = run_on("cpu", norm.float(), inputs.float())
        found = run_on("sim", norm.to(dtype), inputs)
        assert {tensor.dtype for tensor in found} == {dtype, torch.int64}
        found = [tensor.to(oracle.dtype) for tensor, oracle in zip(found, exact, strict=True)]
        check_is_the_cpus(found, exact, rtol=2**-5, atol=2**-5)


def test_batch_norm_saves_the_statistics_that_it_used():
    inputs, mean, variance = normal(3, 5), normal(5), normal(5, seed=1).square()
    arguments = [tensor.to("sim") for tensor in (inputs, mean, variance)]
    for is_training in (False, True):
        _, saved_mean, saved_scale = torch.native_batch_norm(
            arguments[0], None, None, arguments[1], arguments[2], is_training, 0.1, 1e-5
        )
        if is_training:
            mean, variance = inputs.mean(0), inputs.var(0, correction=0)
        torch.testing.assert_close(saved_mean.cpu(), mean)
        torch.testing.assert_close(saved_scale.cpu(), (variance + 1e-5).rsqrt())


# ---- operators that other devices have for more types


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_histograms_of_integers_are_integers(dtype: torch.dtype):
    numbers = torch.randint(8, (50,), generator=torch.Generator().manual_seed(0))
    for bounds in ({}, {"min": 0, "max": 7}, {"min": 2, "max": 5}):
        found = torch.histc(numbers.to("sim", dtype), bins=8, **bounds)
        assert found.dtype == dtype
        assert torch.equal(found.cpu().double(), torch.histc(numbers.double(), bins=8, **bounds))


WIDENED: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "avg_pool3d": (lambda x: functional.avg_pool3d(x, 2), normal(1, 2, 4, 4, 4)),
    "upsample": (
        lambda x: functional.interpolate(x, size=(3, 5), mode="bilinear", antialias=True),
        normal(1, 2, 6, 6),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", WIDENED)
def test_operators_that_the_cpu_has_in_float32_take_16_bits(name: str, dtype: torch.dtype):
    call, inputs = WIDENED[name]
    results = {}
    for device, used in (("sim", dtype), ("cpu", torch.float32)):
        leaf = inputs.to(dtype).to(device, used).requires_grad_()
        result = call(leaf)
        result.sum().backward()
        results[device] = [tensor.detach().cpu().to(dtype) for tensor in (result, leaf.grad)]
        assert result.dtype == leaf.grad.dtype == used
    check_is_the_cpus(results["sim"], results["cpu"], rtol=0, atol=0)
