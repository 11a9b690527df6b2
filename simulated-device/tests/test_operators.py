"""Operators give what torch's CPU gives, bit for bit, in every mode; and no use is unordered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import simulated_device
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

MODES = ["eager", "late", "random"]


def moved(value: object, device: str) -> object:
    """Return tensors and modules, in lists and dicts, on a device."""
    if isinstance(value, Tensor):
        copy = value.detach().to(device, copy=True)
        return copy.requires_grad_(value.requires_grad)
    if isinstance(value, list | tuple):
        return type(value)(moved(each, device) for each in value)
    return value


def tensors_of(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors_of(each)]
    return []


def run_on(device: str, function: Callable, arguments: list) -> list[Tensor]:
    """Return results and, of those that are floating, the gradients of the arguments."""
    inputs = moved(arguments, device)
    with sdpa_kernel(SDPBackend.MATH):
        results = tensors_of(function(*inputs))
    leaves = [tensor for tensor in tensors_of(inputs) if tensor.requires_grad]
    losses = [result.float().square().mean() for result in results if result.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    found = results + [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert all(tensor.device.type == device for tensor in found)
    return [tensor.detach().cpu() for tensor in found]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def learned(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(*shape, seed=seed, dtype=dtype).requires_grad_()


def integers(*shape: int, high: int = 8) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(3))


def indexed_assignment(target: Tensor, index: Tensor, source: Tensor) -> Tensor:
    target = target.clone()
    target[index] = source
    target[1:3, ::2] += 1
    target[target > 1] = -1
    return target


def out_variants(first: Tensor, second: Tensor) -> list[Tensor]:
    added, product, largest = first.new_empty(0), first.new_empty(0), first.new_empty(0)
    indices = torch.empty(0, dtype=torch.int64, device=first.device)
    torch.add(first, second, out=added)
    torch.mm(first, second, out=product)
    torch.max(first, 0, out=(largest, indices))
    found = torch.empty(0, dtype=torch.int64, device=first.device)
    torch.nonzero(first > 0, out=found)
    part = torch.zeros(8, 16, device=first.device)
    torch.mul(first, second, out=part[:, ::2])
    return [added, product, largest, indices, found, part]


def views(tensor: Tensor) -> list[Tensor]:
    return [
        tensor.view(4, 2, 8).permute(2, 0, 1)[3:, 1:].contiguous(),
        tensor.unfold(0, 3, 2),
        tensor.diagonal(1),
        tensor.as_strided((3, 3), (2, 1), 5),
        tensor.chunk(3, 1)[-1],
        *tensor.split([1, 7]),
        *tensor.unbind(1)[:2],
        tensor.T.reshape(-1)[::3],
        tensor.view(torch.int32) if not tensor.requires_grad else tensor,
        tensor.real,
        tensor.expand(2, 8, 8)[1],
    ]


def writes_through_views(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[::5].mul_(2)
    tensor.T[2].zero_()
    tensor.diagonal().add_(1)
    tensor[:, 3].copy_(tensor[:, 4])
    return tensor


def complex_numbers(tensor: Tensor) -> list[Tensor]:
    value = torch.complex(tensor, tensor + 1)
    target = torch.empty_like(value)
    target.copy_(value.conj())
    return [torch.view_as_real(value * value.conj()), torch.view_as_real(target), value.abs()]


def norms_in_bf16(inputs: Tensor, weight: Tensor) -> Tensor:
    return functional.layer_norm(inputs, (8,), weight) + functional.group_norm(inputs, 2)


def resized(tensor: Tensor) -> list[Tensor]:
    grown = tensor.clone().resize_(10, 8)
    storage = tensor.clone()
    storage.untyped_storage().resize_(0)
    storage.untyped_storage().resize_(256)
    storage.fill_(2)
    return [grown[:8], grown.new_zeros(2).set_(grown)[:8], storage]


OPERATORS: dict[str, tuple[Callable, list]] = {
    "elementwise": (lambda a, b: (a * b + a.exp() / (1 + b.abs())).tanh(), [learned(8, 8)] * 2),
    "scalars": (lambda a: (2 * a + 1) ** 3 - torch.tensor(0.5), [learned(8, 8)]),
    "types": (lambda a, b: [a + b, a.int() // (b + 1), a.half(), b.bool()],
              [normal(9), integers(9)]),
    "matmul": (lambda a, b: [a @ b, a.T @ b, torch.einsum("ij,kj->ki", a, b)], [learned(8, 8)] * 2),
    "bmm": (lambda a, b: torch.baddbmm(b, a, b), [learned(3, 8, 8)] * 2),
    "reductions": (lambda a: [a.sum(), a.mean(0), a.std(1), a.amax(1), a.logsumexp(0), a.norm()],
                   [learned(8, 8)]),
    "softmax": (lambda a: [a.softmax(0), a.log_softmax(1)], [learned(8, 8)]),
    "cumulative": (lambda a: [a.cumsum(0), a.cumprod(1), a.cummax(0)], [learned(8, 8)]),
    "sort": (lambda a: [a.sort(0), a.topk(3), a.argsort(1), a.median(1), a.kthvalue(2)],
             [learned(8, 8)]),
    "comparisons": (lambda a, b: [a > b, torch.where(a > b, a, b), a.clamp(-1, 1), a.isnan()],
                    [learned(8, 8), learned(8, 8, seed=4)]),
    "gather": (lambda a, i: [a.gather(0, i), a.index_select(1, i[0]), a[i], a[:, i[1]], a.take(i)],
               [learned(8, 8), integers(8, 8)]),
    "scatter": (lambda a, i: [torch.zeros_like(a).scatter_add(0, i, a), a.index_add(0, i[0], a)],
                [learned(8, 8), integers(8, 8)]),
    "masks": (lambda a: [a[a > 0], a.masked_fill(a > 0, 2), a.nonzero(), a.masked_select(a < 0)],
              [learned(8, 8)]),
    "unique": (lambda a: [*torch.unique(a, return_inverse=True), torch.bincount(a)],
               [integers(30)]),
    "host indices": (lambda a: [a[torch.tensor([1, 2])], a[[0, 3]], a[2], a[..., None]],
                     [learned(8, 8)]),
    "assignment": (indexed_assignment, [learned(8, 8), integers(4), learned(4, 8)]),
    "out=": (out_variants, [normal(8, 8), normal(8, 8, seed=2)]),
    "views": (views, [normal(8, 8)]),
    "views, learned": (views, [learned(8, 8)]),
    "writes through views": (writes_through_views, [learned(8, 8)]),
    "joining": (lambda a, b: [torch.cat([a, b]), torch.stack([a, b], 1), a.repeat(2, 1), a.flip(0)],
                [learned(8, 8)] * 2),
    "complex": (complex_numbers, [normal(8, 8)]),
    "storage": (resized, [normal(8, 8)]),
    "embedding": (lambda w, i: functional.embedding(i, w, padding_idx=2),
                  [learned(8, 4), integers(3, 5)]),
    "embedding bag": (lambda w, i: functional.embedding_bag(i, w), [learned(8, 4), integers(3, 5)]),
    "cross entropy": (lambda a, i: functional.cross_entropy(a, i, label_smoothing=0.1),
                      [learned(6, 8), integers(6)]),
    "losses": (lambda a, b: [functional.mse_loss(a, b), functional.smooth_l1_loss(a, b),
                             functional.binary_cross_entropy_with_logits(a, b.sigmoid())],
               [learned(8, 8), normal(8, 8)]),
    "activations": (lambda a: [functional.gelu(a), functional.silu(a), functional.relu(a),
                               functional.leaky_relu(a), functional.softplus(a)], [learned(8, 8)]),
    "layer norm": (lambda a, w: functional.layer_norm(a, (8,), w, w), [learned(4, 8), learned(8)]),
    "rms norm": (lambda a, w: functional.rms_norm(a, (8,), w), [learned(4, 8), learned(8)]),
    "group norm": (lambda a, w: functional.group_norm(a, 2, w, w), [learned(2, 8, 3), learned(8)]),
    "batch norm": (lambda a, m, v: [functional.batch_norm(a, m, v, training=True), m, v],
                   [learned(6, 8), normal(8), normal(8).abs()]),
    "batch norm, evaluated": (functional.batch_norm,
                              [learned(6, 8), normal(8), normal(8).abs()]),
    "conv1d": (lambda a, w: functional.conv1d(a, w, stride=2),
               [learned(2, 3, 9), learned(4, 3, 3)]),
    "conv2d": (lambda a, w, b: functional.conv2d(a, w, b, padding=1, groups=2),
               [learned(2, 4, 6, 6), learned(4, 2, 3, 3), learned(4)]),
    "conv transpose": (lambda a, w: functional.conv_transpose2d(a, w, stride=2),
                       [learned(2, 3, 5, 5), learned(3, 4, 3, 3)]),
    "pooling": (lambda a: [functional.max_pool2d(a, 2), functional.avg_pool2d(a, 2),
                           functional.adaptive_avg_pool2d(a, 1)], [learned(2, 3, 6, 6)]),
    "interpolation": (lambda a: functional.interpolate(a, scale_factor=2, mode="bilinear"),
                      [learned(2, 3, 4, 4)]),
    "padding": (lambda a: [functional.pad(a, (1, 2)), functional.pad(a, (1, 1), mode="reflect")],
                [learned(2, 3, 4)]),
    "attention": (lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
                  [learned(2, 2, 5, 4)] * 3),
    "linear algebra": (lambda a: [torch.linalg.qr(a)[1], torch.linalg.inv(a), torch.linalg.det(a),
                                  a.tril(), a.diag()], [normal(5, 5)]),
    "foreach": (lambda a, b: [*torch._foreach_add([a, b], [b, a], alpha=2),
                              *torch._foreach_sqrt([a, b]), *torch._foreach_norm([a, b])],
                [normal(8).abs(), normal(8, seed=5).abs()]),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_their_gradients_are_the_cpus(name: str, mode: str):
    simulated_device.set_mode(mode, seed=1)
    function, arguments = OPERATORS[name]
    expected, found = run_on("cpu", function, arguments), run_on("sim", function, arguments)
    assert len(found) == len(expected) > 0
    for result, oracle in zip(found, expected, strict=True):
        assert result.dtype == oracle.dtype
        assert torch.equal(result, oracle) or torch.equal(result.isnan(), oracle.isnan())
        torch.testing.assert_close(result, oracle, rtol=0, atol=0, equal_nan=True)
    assert simulated_device.take_unordered_uses() == []


def test_norms_of_16_bits_round_as_float32_statistics_do():
    arguments = [learned(4, 8, dtype=torch.bfloat16), learned(8, dtype=torch.bfloat16)]
    found, expected = (
        run_on("sim", norms_in_bf16, arguments),
        run_on("cpu", norms_in_bf16, arguments),
    )
    for result, oracle in zip(found, expected, strict=True):
        torch.testing.assert_close(result, oracle, rtol=2**-6, atol=2**-6)


# ---- models


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs of the same shape for the next block."""
        batch, length, width = inputs.shape
        heads = self.qkv(self.first(inputs)).view(batch, length, 3, 2, width // 2)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return inputs + self.down(functional.gelu(self.up(self.second(inputs))))


def transformer(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(11, 16), Block(16), Block(16), nn.Linear(16, 11))


def train(
    device: str, make_optimizer: Callable[..., torch.optim.Optimizer], autocast: bool = False
) -> list[Tensor]:
    """Return the losses of four steps, and the weights after them."""
    model = transformer().to(device)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(4):
        tokens = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(step)).to(device)
        with sdpa_kernel(SDPBackend.MATH), torch.autocast(device, torch.bfloat16, autocast):
            outputs = model(tokens[:, :-1])
        loss = functional.cross_entropy(outputs.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [tensor.detach().cpu() for tensor in [*losses, *model.parameters()]]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, foreach=True),
    "SGD loop": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, foreach=False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_transformer_trains_as_on_the_cpu(name: str, mode: str):
    expected = train("cpu", OPTIMIZERS[name])
    simulated_device.set_mode(mode, seed=2)
    for result, oracle in zip(train("sim", OPTIMIZERS[name]), expected, strict=True):
        assert torch.equal(result, oracle)
    assert simulated_device.take_unordered_uses() == []


def test_autocast_trains_within_the_rounding_of_bf16():
    expected = train("cpu", OPTIMIZERS["SGD foreach"], autocast=True)
    exact = train("cpu", OPTIMIZERS["SGD foreach"])
    found = train("sim", OPTIMIZERS["SGD foreach"], autocast=True)
    for result, oracle in zip(found, expected, strict=True):
        torch.testing.assert_close(result, oracle, rtol=2**-6, atol=2**-6)
    assert not torch.equal(found[3], exact[3]), "autocast did nothing"


def test_autocast_chooses_types_as_cuda_does():
    weight, inputs = normal(8, 8).to("sim"), normal(8, 8).to("sim")
    with torch.autocast("sim", torch.bfloat16):
        assert (inputs @ weight).dtype == torch.bfloat16
        assert functional.linear(inputs, weight).dtype == torch.bfloat16
        assert (inputs @ weight).softmax(-1).dtype == torch.float32
        assert functional.layer_norm((inputs @ weight), (8,)).dtype == torch.float32
        assert (inputs + weight).dtype == torch.float32


def test_a_scaler_skips_a_step_that_overflows():
    results = {}
    for device in ("cpu", "sim"):
        weight = torch.ones(4, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=1)
        for factor in (1.0, float("inf"), 2.0):
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results[device] = [weight.detach().cpu(), torch.tensor(scaler.get_scale())]
    for result, oracle in zip(results["sim"], results["cpu"], strict=True):
        assert torch.equal(result, oracle)


# ---- foreach


def test_integers_are_counted_as_cuda_counts_them():
    """The CPU refuses them."""
    values = integers(50, high=4).int()
    found = torch.histc(values.to("sim"), bins=4, min=0, max=3)
    assert found.dtype == torch.int32
    assert found.tolist() == torch.bincount(values, minlength=4).tolist()


def test_a_foreach_operator_is_one_kernel():
    tensors = [torch.ones(3, device="sim") for _ in range(5)]
    before = simulated_device.launches()
    torch._foreach_add_(tensors, 1)
    after = simulated_device.launches()
    assert {k: after[k] - before.get(k, 0) for k in after if after[k] != before.get(k, 0)} == {
        "aten::_foreach_add_": 1
    }


def test_a_foreach_copy_takes_tensors_of_the_host():
    targets = [torch.zeros(3, device="sim") for _ in range(2)]
    torch._foreach_copy_(targets, [torch.full((3,), 1.0), torch.full((3,), 2.0)])
    assert [target.cpu().tolist() for target in targets] == [[1.0] * 3, [2.0] * 3]


# ---- refusals


def test_operands_of_the_host_are_refused():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device="sim") + torch.ones(2)
    assert (torch.ones(2, device="sim") + torch.tensor(1.0)).tolist() == [2.0, 2.0]


def test_an_error_of_a_kernel_is_raised_at_the_next_wait():
    table = torch.ones(3, 2, device="sim")
    functional.embedding(torch.tensor([5], device="sim"), table)
    with pytest.raises(RuntimeError, match=r"asynchronously: aten::\w+: .*out of range"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_a_number_of_the_host_is_read_at_the_launch():
    number, tensor = torch.tensor(1.0), torch.zeros(2, device="sim")
    result = tensor + number
    number.fill_(5)
    assert result.tolist() == [1.0, 1.0]
