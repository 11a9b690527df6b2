"""Random numbers: seeds, states, and equal numbers in every mode."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import simulated_device
import torch
from torch import Tensor
from torch.nn import functional

DRAWS: dict[str, Callable[[], Tensor]] = {
    "randn": lambda: torch.randn(500, device="sim"),
    "rand": lambda: torch.rand(500, device="sim"),
    "randint": lambda: torch.randint(1000, (500,), device="sim"),
    "randperm": lambda: torch.randperm(500, device="sim"),
    "normal_": lambda: torch.empty(500, device="sim").normal_(),
    "bernoulli": lambda: torch.full((500,), 0.5, device="sim").bernoulli(),
    "multinomial": lambda: torch.ones(500, device="sim").multinomial(400),
    "dropout": lambda: functional.dropout(torch.ones(500, device="sim")),
    "native dropout": lambda: torch.native_dropout(torch.ones(500, device="sim"), 0.5, True)[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_equal_seeds_give_equal_numbers_in_every_mode(name: str):
    results = []
    for mode in ("eager", "late", "random"):
        simulated_device.set_mode(mode)
        torch.manual_seed(5)
        results.append((DRAWS[name]().cpu(), DRAWS[name]().cpu()))
    for first, second in results:
        assert torch.equal(first, results[0][0])
        assert torch.equal(second, results[0][1])
        assert not torch.equal(first, second)
    torch.manual_seed(6)
    assert not torch.equal(DRAWS[name]().cpu(), results[0][0])


@pytest.mark.parametrize("name", DRAWS)
def test_the_hosts_generator_is_left_alone(name: str):
    before = torch.get_rng_state()
    DRAWS[name]().cpu()
    assert torch.equal(torch.get_rng_state(), before)


def test_host_and_device_draw_at_the_same_time():
    """Kernels run on other threads, too, beside a host that uses its own generator."""
    inputs = torch.ones(500_000, device="sim")
    simulated_device.set_mode("late")

    def kept() -> Tensor:
        torch.manual_seed(5)
        return torch.stack([torch.native_dropout(inputs, 0.5, True)[1] for _ in range(20)])

    def run() -> Tensor:
        result, state = kept(), torch.get_rng_state()
        device = threading.Thread(target=torch.sim.synchronize)
        device.start()
        while device.is_alive():
            torch.set_rng_state(state)
            assert torch.rand(()) == host
        return result.cpu()

    expected = kept().cpu()
    torch.manual_seed(5)
    host = torch.rand(())
    assert torch.equal(run(), expected)


def test_states_are_saved_and_restored():
    torch.randn(3, device="sim")
    state = torch.sim.get_rng_state()
    first = torch.randn(3, device="sim").tolist()
    assert torch.randn(3, device="sim").tolist() != first
    torch.sim.set_rng_state(state)
    assert torch.randn(3, device="sim").tolist() == first
    with torch.random.fork_rng(device_type="sim"):
        torch.manual_seed(9)
        forked = torch.randn(3, device="sim").tolist()
    torch.sim.set_rng_state_all([state])
    assert torch.randn(3, device="sim").tolist() == first != forked


def test_a_state_of_another_size_is_refused():
    with pytest.raises(RuntimeError, match="16 bytes"):
        torch.sim.set_rng_state(torch.zeros(15, dtype=torch.uint8))


def test_seeds_are_set_for_all_devices():
    torch.manual_seed(3)
    assert torch.sim.initial_seed() == 3
    torch.sim.manual_seed(4)
    assert torch.sim.initial_seed() == 4
    assert torch.sim.default_generators[0].initial_seed() == 4


def test_a_generator_of_ones_own():
    generator = torch.Generator("sim").manual_seed(7)
    default = torch.sim.get_rng_state()
    first = torch.randn(3, device="sim", generator=generator).tolist()
    assert torch.equal(torch.sim.get_rng_state(), default)
    copy = generator.clone_state()
    assert generator.manual_seed(7).initial_seed() == 7
    assert torch.randn(3, device="sim", generator=generator).tolist() == first
    assert torch.equal(copy.get_state(), generator.get_state())


def test_a_generator_of_the_host_is_refused():
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.randn(3, device="sim", generator=torch.Generator())


def test_dropout_drops_its_share_and_scales_the_rest():
    inputs = torch.randn(10_000).to("sim").requires_grad_()
    outputs = functional.dropout(inputs, 0.25)
    outputs.sum().backward()
    kept = outputs.detach().cpu() != 0
    assert 0.72 < kept.float().mean() < 0.78
    expected = torch.where(kept, inputs.detach().cpu() / 0.75, torch.zeros(()))
    torch.testing.assert_close(outputs.detach().cpu(), expected)
    torch.testing.assert_close(inputs.grad.cpu(), kept / 0.75)


def test_numbers_have_their_distribution():
    numbers = torch.randn(20_000, device="sim").cpu()
    assert abs(numbers.mean()) < 0.03
    assert abs(numbers.std() - 1) < 0.03
