"""Built in parts, a model has the values of plain construction, and nobody ever held the whole.

Inside `Init`, or from the meta device by `materialise`.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
import zero_partition
import zoo
from high_water import HighWater, giving_memory_back, needs_high_water
from parity import ZeroConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from training import assert_weights_of
from zero_comm import AgreementError, Group
from zero_comm.testing import RankPool, equal, without_default_device
from zero_engine import ConfigError
from zero_partition import PartitionError, StateError
from zero_partition.seams import find_sharded
from zoo_of_constructors import CONSTRUCTORS, Mlp, assert_built_as

# ---- Values ----


TRANSFORMERS = ("gpt2", "t5", "mixtral")  # `post_init()` initialises the children, and ties
BATCHES = (600, 0, 2**20)  # bytes


@pytest.mark.parametrize(
    ("name", "batch_bytes"),
    [(name, BATCHES[turn % 3]) for turn, name in enumerate([*CONSTRUCTORS, *TRANSFORMERS])],
)
@pytest.mark.ranks(timeout_s=90)
def test_a_model_built_in_parts_has_the_plain_values(
    group: Group, name: str, batch_bytes: int
) -> None:
    """A write that is lost, or a random number drawn elsewhere, is another model."""
    make = zoo.ZOO[name].make if name in TRANSFORMERS else CONSTRUCTORS[name]
    _build_and_compare(group, make, batch_bytes)


@pytest.mark.ranks(1, 3)
def test_any_number_of_ranks_builds_the_same(group: Group) -> None:
    """Three divide nothing, and one is not a special case."""
    _build_and_compare(group, CONSTRUCTORS["Tiny"])


def test_what_init_builds_is_on_the_groups_device(group: Group) -> None:
    """Scripts name no device, and what they had built on the CPU was refused."""
    with without_default_device():
        with zero_engine.Init(group=group):
            model = parity.tiny_float32()
        assert torch.ones(()).is_cpu
        with torch.device("meta"), zero_engine.Init(group=group):
            assert parity.tiny_float32().scale.is_meta

    assert {param.device for param in model.parameters()} == {group.device}
    assert model.positions.device == group.device


def _build_and_compare(group: Group, make: Callable[[], nn.Module], batch_bytes: int = 0) -> None:
    plain = parity.build(make)
    after = torch.rand(())
    torch.manual_seed(group.rank * 99)  # rank 0's values win, as in shard()
    with zero_partition.Init(group=group, batch_bytes=batch_bytes):
        model = make()
    assert group.rank or equal(torch.rand(()), after)  # and no random number was lost

    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, type(expected))
        assert (param.shape, param.dtype) == (expected.shape, expected.dtype)
        assert param.requires_grad == expected.requires_grad
    assert_built_as(model, plain, group=group)


def test_init_converts_a_model_that_exists(group: Group) -> None:
    """Built by others, whole: from here on each rank keeps its part; rank 0's values win."""
    model = parity.build(seed=group.rank)
    zero_engine.Init(model, group=group)

    assert_built_as(model, parity.build(), group=group)


def test_init_may_be_entered_again_to_change_values(group: Group) -> None:
    """A cast, new values for one layer: between construction and shard() they still have a way."""

    def change(model: nn.Module) -> None:
        model.to(torch.bfloat16)
        nn.init.normal_(model.up.weight)

    plain = parity.build(Mlp)
    change(plain)
    with zero_engine.Init(group=group):
        model = parity.build(Mlp)
    with zero_engine.Init(group=group):
        change(model)

    assert_built_as(model, plain, group=group)


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_from_a_model_built_in_parts(group: Group, stage: int) -> None:
    """The flat buffers of units are laid out from single shards; nothing may move or be lost."""
    plain, its_optimizer = parity.build_sharded(group, ZeroConfig(stage))
    expected = parity.run_steps(plain, its_optimizer, range(3), rank=group.rank)
    with zero_partition.Init(group=group):
        model = parity.build()
    optimizer = parity.OPTIMIZERS["adamw"](parity.param_groups(model))
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)

    for ours, theirs in zip(model.modules(), plain.modules(), strict=True):
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks"):
            found = [type(hook) for hook in vars(ours)[kind].values()]  # none of Init
            assert found == [type(hook) for hook in vars(theirs)[kind].values()]
    assert not any("__deepcopy__" in vars(param) for param in model.parameters())
    assert parity.run_steps(model, optimizer, range(3), rank=group.rank) == expected
    parity.assert_same_weights(
        zero_engine.full_state_dict(model), zero_engine.full_state_dict(plain), what="weights"
    )


def test_init_below_stage_3_leaves_parameters_whole(group: Group) -> None:
    """One script for all stages; where parameters rest whole there is nothing to save."""
    plain = parity.build()
    with zero_engine.Init(group=group, config=ZeroConfig(2)):
        model = parity.build()

    assert all(map(equal, model.parameters(), plain.parameters()))


# ---- Memory ----


WIDTH, NUM_BLOCKS = 1024, 16
UNIT_BYTES = 4 * WIDTH * (WIDTH + 1)
WHOLE_BYTES = NUM_BLOCKS * UNIT_BYTES + 4 * WIDTH * WIDTH


class _Wide(nn.Module):
    """Own parameter around children, all initialised after the children are built."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks)))
        self.apply(_fill)


def _fill(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.normal_(param)


@needs_high_water
def test_the_peak_is_a_part_and_one_unit(tmp_path: Path) -> None:
    """The reason for all of it: M/N plus the largest unit plus a tenth, shard() included.

    Measured by the kernel, which overlooks nothing that libraries and collectives hold, of ranks
    that have done nothing before: their allocators have no holes.
    """
    for num_blocks in (1, NUM_BLOCKS):
        save_file(_Wide(num_blocks).state_dict(), tmp_path / f"{num_blocks}.safetensors")
    bound = 1.1 * (WHOLE_BYTES / 2 + UNIT_BYTES)
    with RankPool(2) as fresh:
        for route in ("init", "materialise", "load"):
            peaks = fresh.run(_measure_peak, route=route, folder=tmp_path, timeout_s=90.0)
            assert max(peaks) <= bound < WHOLE_BYTES, (route, peaks, bound)


def _measure_peak(group: Group, route: str, folder: Path) -> int:
    _build(route, group, 1, folder)  # what torch loads at first use
    gc.collect()
    with giving_memory_back():
        high_water = HighWater()
        model = _build(route, group, NUM_BLOCKS, folder)
        assert find_sharded(model) is not None
        return high_water.rise_bytes()


def _build(route: str, group: Group, num_blocks: int, folder: Path) -> nn.Module:
    context = zero_engine.Init(group=group) if route == "init" else torch.device("meta")
    with context:
        model = _Wide(num_blocks)
    if route == "materialise":
        zero_engine.materialise(model, _fill, group=group)
    if route == "load":
        zero_engine.load_pretrained(model, f"{folder}/{num_blocks}.safetensors", group=group)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    return model


# ---- What is left behind ----


def test_an_exception_inside_undoes_everything(group: Group) -> None:
    """A notebook goes on after an error; torch must be as it was, and ranks must not wait."""

    def look() -> list[Any]:
        hooks = nn.modules.module
        return [
            *(dict(vars(kind)) for kind in (nn.Module, nn.Linear, nn.Parameter, nn.init)),
            torch.empty,
            list(hooks._global_parameter_registration_hooks.values()),
            list(hooks._global_module_registration_hooks.values()),
            _get_current_function_mode_stack(),
        ]

    before = look()
    with pytest.raises(ZeroDivisionError), zero_engine.Init(group=group):
        first = nn.Linear(4, 4)
        with zero_partition.Init(group=group, batch_bytes=0):
            second = Mlp()
            nn.init.ones_(second.up.weight)
            if group.rank == 0:
                _ = 1 / 0
            raise ZeroDivisionError

    assert look() == before
    plain = nn.Linear(4, 4)
    assert plain.weight.untyped_storage().nbytes() == 64
    assert not plain._forward_pre_hooks
    assert first is not None


def test_nested_contexts_shard_once(group: Group) -> None:
    """A library that builds its part inside its own Init must not undo, or redo, the user's."""

    def build() -> nn.Module:
        with zero_partition.Init(group=group, batch_bytes=0):
            inner = Mlp()
        outer = nn.Linear(8, 8)
        nn.init.normal_(inner.up.weight)
        return nn.ModuleList([inner, outer, Mlp()])

    torch.manual_seed(0)
    with zero_partition.Init(group=group, batch_bytes=0):
        model = build()
    torch.manual_seed(0)
    plain = nn.ModuleList([Mlp(), nn.Linear(8, 8)])
    nn.init.normal_(plain[0].up.weight)
    plain.append(Mlp())

    assert_built_as(model, plain, group=group)


# ---- Between Init and shard() ----


def test_nothing_takes_stand_ins_for_weights(group: Group) -> None:
    """A NaN that is saved, or trained on, is found days later."""
    with zero_engine.Init(group=group):
        model = parity.build(Mlp)

    with pytest.raises(StateError, match=r"Linear whose parameter 'weight'.*zero_engine\.shard"):
        model(torch.ones(8))
    with pytest.raises(StateError, match=r"'up\.weight' was sharded by Init"):
        torch.save(model.state_dict(), io.BytesIO())
    with pytest.raises(StateError, match=r"pickling Linear\.weight"):
        pickle.dumps(model)
    with zero_engine.Init(group=group):
        assert not torch.isnan(model(torch.ones(8))).any()
        assert not any(torch.isnan(value).any() for value in model.state_dict().values())
    reference = copy.deepcopy(model)
    model.up.weight.data = torch.zeros(16, 8)
    with pytest.raises(PartitionError, match=r"'up\.weight' was changed after Init"):
        zero_engine.shard(model, None, group=group)
    assert_built_as(reference, parity.build(Mlp), group=group)


# What reads or writes a parameter's values, by the name that its error has.
VALUE_USES: dict[str, Callable[[nn.Linear], Any]] = {
    "norm": lambda linear: linear.weight.norm(),
    "data": lambda linear: linear.weight.data.normal_(),
    "normal_": lambda linear: nn.init.normal_(linear.weight),
    "detach": lambda linear: nn.Parameter(linear.weight),
    "clone": lambda linear: linear.weight.clone(),
    "__getitem__": lambda linear: linear.weight[:4],
    "cat": lambda linear: torch.cat([torch.ones(1, 8), linear.weight]),
    "copy_": lambda linear: torch.empty(16, 8).copy_(linear.weight),
    "T": lambda linear: linear.weight.T,
    "to": lambda linear: linear.to(torch.bfloat16),
    "double": lambda linear: linear.weight.double(),
    "tolist": lambda linear: linear.weight.tolist(),
    "linear": lambda linear: nn.functional.linear(torch.ones(8), linear.weight),
}


@pytest.mark.parametrize("how", ["Init", "Init(model)", "load_pretrained", "a copy"])
def test_values_are_refused_between_init_and_shard(group: Group, how: str, tmp_path: Path) -> None:
    """Code such as resize_token_embeddings() copied NaN, in silence."""
    plain = parity.build(Mlp)
    if how == "Init":
        with zero_engine.Init(group=group):
            model = parity.build(Mlp)
    elif how == "load_pretrained":
        torch.save(plain.state_dict(), tmp_path / f"{group.rank}.pt")
        with torch.device("meta"):
            model = Mlp()
        zero_engine.load_pretrained(model, tmp_path / f"{group.rank}.pt", group=group)
    else:
        model = parity.build(Mlp)
        zero_engine.Init(model, group=group)
        model = copy.deepcopy(model) if how == "a copy" else model

    def is_refused() -> bool:
        for name, use in VALUE_USES.items():
            message = rf"^{name} was called on parameter '[\w.]*weight'.*Init.*GatheredParameters"
            with pytest.raises(StateError, match=message), torch.no_grad():
                use(model.up)
        return True

    assert is_refused()
    assert f"sharded over {group.world_size} rank" in repr(model.up.weight)
    assert model.up.weight.shape == (16, 8) == torch.empty_like(model.up.weight).shape
    assert model.to("cpu" if group.device.type == "cpu" else group.device) is model
    with zero_engine.GatheredParameters(model.up.weight, modifier_rank=0), torch.no_grad():
        model.up.weight.add_(1)
    assert is_refused()
    with zero_engine.Init(group=group), torch.no_grad():
        model.up.weight.add_(1)
        model.alias = nn.Parameter(model.down.weight)
        with zero_partition.Init.suspended():
            assert is_refused()
        assert model.up.weight.norm().isfinite()
    assert is_refused()
    with zero_partition.Init.suspended():  # nothing to suspend
        assert is_refused()
    assert is_refused()
    plain.alias = nn.Parameter(plain.down.weight.detach().clone())
    with torch.no_grad():
        plain.up.weight.add_(1).add_(1)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, parity.ZeroConfig(3), group=group)
    assert type(zero_engine.full_param(model.up.weight)) is Tensor
    assert_weights_of(model, plain, group=group, what=how)


def test_ranks_that_build_different_models_are_told(group: Group) -> None:
    """The sizes of a broadcast differ, and that is a hang or garbage on most backends."""
    with (
        pytest.raises(AgreementError, match=r"shard Linear\.weight \(4, 8\)"),
        zero_engine.Init(group=group),
    ):
        _ = nn.Sequential(nn.Linear(8, 4 + group.rank))
    with (
        pytest.raises(AgreementError, match=r"round \d+ of Init: .*Linear\.weight \(16, 8\)"),
        zero_partition.Init(group=group, batch_bytes=0),
    ):
        model = Mlp()
        torch.zeros(1)  # up to here all is sharded
        (model.up if group.rank else model.down).weight.sum()
    blank = nn.Linear(4, 4 + group.rank, device="meta")
    with pytest.raises(AgreementError, match=r"'weight' on the meta device.*\(5, 4\)"):
        zero_engine.materialise(blank, group=group)


@pytest.mark.ranks(1)
def test_a_parameter_that_cannot_be_sharded_is_named(group: Group) -> None:
    """As plain shard() does, only sooner."""
    with (
        pytest.raises(PartitionError, match=r"Linear\.table.*as expand\(\) makes it"),
        zero_engine.Init(group=group),
    ):
        model = nn.Linear(2, 2)
        model.table = nn.Parameter(torch.randn(2, 1).expand(2, 3))


def test_several_ranks_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would keep a whole model, and nothing would say that it was not sharded."""
    monkeypatch.setenv("WORLD_SIZE", "8")

    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8.*zero_comm\.init"):
        zero_engine.Init()
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8.*zero_comm\.init"):
        zero_engine.shard(nn.Linear(2, 2))
    monkeypatch.setenv("WORLD_SIZE", "many")
    zero_engine.shard(nn.Linear(2, 2))


# ---- From the meta device ----


class _Blank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.batch = nn.BatchNorm1d(8)
        self.listed = nn.ParameterList(torch.empty(3) for _ in range(2))
        self.scale = nn.Parameter(torch.empty(1), requires_grad=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.register_buffer("mask", torch.empty(3, 3, dtype=torch.bool))
        self.same = self.frequencies  # an alias that must not stay behind
        self.table = torch.empty(3)


def _fill_blank(module: nn.Module) -> None:
    """Parents write to children, out of order; buffers are computed."""
    if isinstance(module, nn.Linear | nn.LayerNorm | nn.BatchNorm1d):
        module.reset_parameters()
    if isinstance(module, nn.ParameterList):
        for param in module:
            nn.init.uniform_(param)
    if isinstance(module, _Blank):
        nn.init.normal_(module.embed.weight, std=0.1)
        nn.init.ones_(module.scale)
        module.head.weight.data[1:3] = 4.0
        nn.init.normal_(module.frequencies)
        module.mask.copy_(torch.ones(3, 3).tril())
        module.table = torch.arange(3.0)


def _on_meta(make: Callable[[], nn.Module] = _Blank) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.mark.ranks(1, 2)
def test_values_are_those_of_to_empty_and_apply(group: Group) -> None:
    """Torch's own two steps are the oracle; ties, which its to_empty() cuts, are kept."""
    plain = _Blank()
    torch.manual_seed(0)
    plain.apply(_fill_blank)
    model = _on_meta()
    faces = list(model.parameters())
    torch.manual_seed(group.rank * 7)
    zero_engine.materialise(model, _fill_blank, group=group)

    assert all(a is b for a, b in zip(model.parameters(), faces, strict=True))
    assert model.head.weight is model.embed.weight
    assert model.same is model.frequencies
    assert equal(model.frequencies, plain.frequencies)
    assert not model.scale.requires_grad and model.embed.weight.requires_grad
    assert_built_as(model, plain, group=group)


def test_reset_parameters_is_the_default_for_what_has_no_values(group: Group) -> None:
    """Most modules of torch know how to fill themselves; a backbone that exists is kept."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LSTM(8, 8), nn.Embedding(5, 8))

    plain, model = make(), _on_meta(make)
    model[0] = copy.deepcopy(plain[0])
    torch.manual_seed(0)
    for module in plain[1:]:
        module.reset_parameters()
    torch.manual_seed(0)
    zero_engine.materialise(model, group=group)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    assert_weights_of(model, plain, group=group, what="materialised")


def test_what_was_left_unwritten_is_named(group: Group) -> None:
    """Junk in a table of positions, or in half a matrix, is NaN or nonsense hours later."""

    def leave_out(module: nn.Module) -> None:
        if isinstance(module, _Blank):
            with torch.no_grad():
                module.embed.weight[:5] = 0.0  # the rest is the other rank's
        elif not (isinstance(module, nn.Linear) and module.bias is None):
            _fill_blank(module)

    with pytest.raises(PartitionError) as caught:
        zero_engine.materialise(_on_meta(), leave_out, group=group)
    found = str(caught.value).split(":")[0]
    assert found == "'scale', 'embed.weight', 'frequencies', 'mask', 'table'"

    model = _on_meta()  # whose own parameters no reset_parameters() fills: said at the beginning
    with pytest.raises(PartitionError, match=r"'scale', 'frequencies', 'mask'.*init=fn"):
        zero_engine.materialise(model, group=group)
    assert all(param.is_meta for param in model.parameters())


class _Rotary(nn.Module):
    """Computes its tables anew in `reset_parameters`, as litgpt, nanochat and torchtitan do."""

    cos: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(8, 4), persistent=False)
        self.register_buffer("table", torch.empty(4, 6, dtype=torch.complex64))
        self.weight = nn.Parameter(torch.empty(600, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Assign what `__init__` left empty."""
        angles = torch.outer(torch.arange(8.0), torch.arange(1.0, 5))
        self.cos = angles.cos().bfloat16()  # another dtype
        self.table = torch.polar(torch.ones(6, 4), torch.rand(6, 4)).t()  # not contiguous
        self.weight = nn.Parameter(torch.randn(600, 4))


def test_init_may_put_other_tensors_in_their_place(group: Group) -> None:
    """It was refused as not initialised, though nothing of it was missing."""
    with torch.device("meta"):
        model = nn.ModuleList([_Rotary(), nn.Linear(4, 4)])
    plain = parity.build(lambda: nn.ModuleList([_Rotary(), nn.Linear(4, 4)]))
    for module in (model, plain):
        torch.manual_seed(5 + group.rank * (module is model))  # values of rank 0
        if module is model:
            zero_engine.materialise(model, group=group)
        else:
            plain[0].reset_parameters()
            plain[1].reset_parameters()
    assert model[0].weight.untyped_storage().nbytes() == 4  # sharded
    for name, buffer in model.named_buffers():
        assert equal(buffer, plain.get_buffer(name)), name
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    assert_weights_of(model, plain, group=group, what="assigned")

    with torch.device("meta"):
        left = nn.ModuleList([_Rotary()])

    def leave(module: nn.Module) -> None:
        if isinstance(module, _Rotary):
            module.reset_parameters()
            module.cos = torch.empty(8, 4, device="meta")

    with pytest.raises(PartitionError, match=r"'0\.cos': not, or not wholly"):
        zero_engine.materialise(left, leave, group=group)


DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.int64, torch.uint8, torch.bool),
)


def test_every_dtype_can_say_that_it_was_not_written(group: Group) -> None:
    """Of each, one element that is left out is found; memory holds anything."""
    for dtype in DTYPES:
        for until in (0, 2, 3):
            model = nn.Linear(3, 1, bias=False, device="meta")
            model.register_buffer("values", torch.empty(3, dtype=dtype, device="meta"))

            @torch.no_grad()
            def write(module: nn.Module, until: int = until) -> None:
                module.weight.zero_()
                module.values[:until] = 1

            says = pytest.raises(PartitionError, match="values") if until < 3 else nullcontext()
            with says:
                zero_engine.materialise(model, init=write, group=group)
        assert model.values.tolist() == [1, 1, 1]
