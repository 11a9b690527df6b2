"""The sanitizer finds each kind of fault, by name, and nothing else; numbers are what they are."""

from __future__ import annotations

import inspect
import logging
import os
import re
from pathlib import Path
from typing import Any, Final

import parity
import pytest
import torch
import torch.distributed as dist
import zero_engine
from parity import ZeroConfig
from residences import Blocks, Cell, assert_same, parts_of, sharded, train
from torch import Tensor, nn
from zero_ckpt import checkpoint
from zero_comm import AgreementError, Group, all_gather_flat
from zero_comm.failure import describe_launches
from zero_engine import Offload, Precision, clip_grad_norm_
from zero_offload import StoreError, TornStepError
from zero_partition import GatheredParameters, Wire
from zero_partition.seams import SanitizerError, offload_states, reload_states, require_sharded

WIDTH: Final = 8


def _sharded(
    group: Group, stage: int, *, num_layers: int = 3, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    )
    optimizer = parity.adamw(model)
    config = ZeroConfig(stage, sanitize=True, **{"window": 3, **settings})
    zero_engine.shard(model, optimizer, config, group=group)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, *, extra: Any = lambda: 0.0) -> None:
    (model(torch.ones(2, WIDTH)).square().mean() + extra()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _found(model: nn.Module, optimizer: torch.optim.Optimizer, *texts: str, **options: Any) -> None:
    """The next steps raise an error that says all this."""
    with pytest.raises(SanitizerError) as found:
        for _ in range(2):
            _step(model, optimizer, **options)
    assert all(text in str(found.value) for text in texts), str(found.value)


# ---- Nothing is found where nothing is wrong ----


class Shift(nn.Module):
    """A unit whose output views its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(parity.WIDTH))

    def forward(self) -> Tensor:  # noqa: D102
        return self.value[:]


class Recomputed(Blocks):
    """Its blocks are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ModuleList(Shift() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens) + self.frozen
        for block, shift in zip(self.blocks, self.shifts, strict=True):
            x = checkpoint(block, x) + shift()
        return self.head(x).float()


CLEAN: Final[dict[str, tuple[Cell | None, dict[str, Any]]]] = {
    **{f"stage {stage}": (None, {"stage": stage}) for stage in parity.STAGES},
    "poisoned": (Cell(3, "disk", "disk", residence="poisoned"), {}),
    "stage 2, disk": (Cell(2, "disk"), {"stage": 2}),
    "masters": (None, {"precision": Precision(params=torch.bfloat16), "window": 1}),
    "codecs": (None, {"wire": Wire(levels=2, params="int8", gradients="int8")}),
    "small": (None, {"small_param_numel": 20}),
}


@pytest.mark.parametrize("case", CLEAN)
@pytest.mark.ranks(2, timeout_s=120)
def test_a_sanitized_training_has_the_bits_of_another(
    group: Group, tmp_path: Path, case: str
) -> None:
    """What it finds else would be its own doing, and a fault might go when it is looked for."""
    cell, settings = CLEAN[case]

    def run(*, sanitize: bool) -> dict[str, Any]:
        options = {"make": Recomputed, "sanitize": sanitize, **settings}
        with sharded(group, cell, tmp_path, **options) as (model, optimizer):
            losses = train(model, optimizer, group.rank)
            return parts_of(model, optimizer) | {"losses": losses}

    assert_same(run(sanitize=True), run(sanitize=False), case)


def test_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is not to be changed can be sanitized."""
    monkeypatch.setenv("ZERO_SANITIZE", "1")

    assert ZeroConfig().sanitize
    assert not ZeroConfig(sanitize=False).sanitize


# ---- Each kind of fault ----


def _keep_alias(model: nn.Module, aliases: list[Tensor]) -> None:
    model[0].register_forward_hook(lambda module, *_: aliases.append(module.weight.data))


@pytest.mark.parametrize("reads", ["inside", "in the loss"])
def test_a_weight_that_is_read_after_its_turn_is_found(group: Group, reads: str) -> None:
    """The slot may hold another unit's values by then, and the loss would be wrong in silence."""
    model, optimizer = _sharded(group, stage=3)
    aliases: list[Tensor] = []
    _keep_alias(model, aliases)
    if reads == "inside":
        model[2].register_forward_hook(lambda _, __, output: output + aliases[-1].sum())
        texts, extra = ["the output of unit '2'"], lambda: 0.0
    else:
        weight = lambda: aliases[-1].square().sum() * model[2].bias.sum()  # noqa: E731
        texts, extra = ["gradient of unit '2', parameter '2.bias'"], weight

    _found(model, optimizer, "unit '0', parameter '0.weight'", *texts, "alias", extra=extra)


def test_a_weight_that_is_written_after_its_turn_is_found(group: Group) -> None:
    """The write is lost, or changes another unit."""
    model, optimizer = _sharded(group, stage=3)
    aliases: list[Tensor] = []
    _keep_alias(model, aliases)

    def write() -> float:
        aliases[-1][1, 2] = 0
        return 0.0

    rank = f"rank {group.rank}"
    _found(model, optimizer, "unit '0', parameter '0.weight', element 10 of 64", rank, extra=write)


@pytest.mark.parametrize(
    ("name", "hit"), [("weight", "'0.bias', element 0"), ("bias", "'0.bias', element 8")]
)
def test_a_write_past_a_span_is_found(group: Group, name: str, hit: str) -> None:
    """It changes what lies there, another parameter or nothing yet."""
    model, optimizer = _sharded(group, stage=3)

    def overrun(module: nn.Module, *_: Any) -> None:
        weight = getattr(module, name).data
        weight.as_strided((weight.numel() + 1,), (1,))[-1] = 0

    model[0].register_forward_hook(overrun)

    _found(model, optimizer, "unit '0'", hit, f"rank {group.rank}", "past the end of a view")


@pytest.mark.parametrize(
    ("stage", "params", "reading"),
    [
        (1, torch.bfloat16, True),
        (2, torch.float32, False),
        (3, torch.float32, True),
        (3, torch.float32, False),
        (3, torch.bfloat16, True),
    ],
)
def test_a_flipped_bit_of_one_rank_is_found_by_all(
    group: Group, stage: int, params: torch.dtype, reading: bool
) -> None:
    """Ranks would compute with different weights, and no loss shows it."""
    group = group if reading else parity.by_messages()
    model, optimizer = _sharded(group, stage, precision=Precision(params=params))
    _step(model, optimizer)
    if group.rank == 1:
        shards = [p for p in optimizer.param_groups[0]["params"] if p.numel()]
        shards[0].as_subclass(Tensor).data.view(torch.int32)[0] ^= 1 << 20
    dist.barrier(group.process_group)  # else the others may have read it before

    is_read = group.exchanges.reads_peers and params is torch.float32
    is_sent = stage == 3 and (is_read or group.device.type != "cpu")
    how = "checksum" if is_sent else "what the last step has left"
    _found(model, optimizer, "unit '", "parameter '", "(rank 1)", how, "flipped bit")


class _Flips(dict):
    """Where state is parked; a bit of the first parameters changes there on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.left = rank

    def allocate(self, sizes: dict[str, int]) -> None:
        """Takes what comes."""

    def write(self, key: str, source: Tensor, *, non_blocking: bool) -> None:
        """Keep it."""
        self[key] = source.clone()

    def read(self, key: str, into: Tensor, *, non_blocking: bool) -> None:
        """Give it back."""
        into.copy_(self[key])
        if key.startswith("params") and self.left:
            into[0] ^= 4
            self.left = 0

    def close(self) -> None:
        """Nothing is left to do."""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bit_that_flips_while_state_is_parked_is_found(group: Group, stage: int) -> None:
    """Host memory is where bits flip, and parameters are there for a whole phase."""
    model, optimizer = _sharded(group, stage)
    _step(model, optimizer)
    offload_states(model, _Flips(group.rank))
    reload_states(model)
    dist.barrier(group.process_group)

    _found(model, optimizer, "unit '", "parameter '", "(rank 1)", "flipped bit")


@pytest.mark.cpu_only("elsewhere a slot that nobody has takes no memory")
def test_what_writes_to_a_slot_of_gradients_is_found(group: Group) -> None:
    """The next gradient there would be added to it, or travel with it."""
    model, optimizer = _sharded(group, stage=2)
    _step(model, optimizer)
    slot = require_sharded(model).reducer.pool.slots[0]
    assert slot.memory is not None
    slot.memory[-1] = 0

    _found(model, optimizer, "the slot of its gradients", f"rank {group.rank}")


def test_collectives_in_another_order_are_found(group: Group) -> None:
    """With equal sizes they would mix values; else they might never end."""
    model, optimizer = _sharded(group, stage=3)
    _step(model, optimizer)
    numels = (3, 4) if group.rank == 0 else (4, 3)

    with pytest.raises(AgreementError, match=r"rank 0 .* \(3, 3\) .*\n  rank 1 .* \(4, 4\)"):
        for numel in numels:
            out = torch.ones(numel * group.world_size)
            all_gather_flat(out, splits=(numel,) * group.world_size, group=group).wait()


LONE_CALLS: Final[dict[str, Any]] = {
    "full_state_dict": lambda model, *_: zero_engine.full_state_dict(model),
    "full_param": lambda model, *_: zero_engine.full_param(model[0].weight),
    "save": lambda *of: zero_engine.save(of[2], *of[:2], step=1),
    "GatheredParameters": lambda model, *_: GatheredParameters(model[0].weight).__enter__(),
    "norm": lambda model, *_: model[0].weight.norm(),
    "load_state_dict": lambda model, *_: model.load_state_dict(
        {name: torch.zeros(each.shape) for name, each in model.named_parameters()}
    ),
}


@pytest.mark.parametrize(
    ("call", "stage"),
    # At stage 1 the context and the norm send nothing.
    [
        (call, stage)
        for call in LONE_CALLS
        for stage in (1, 3)
        if stage == 3 or call not in {"GatheredParameters", "norm"}
    ],
)
def test_a_call_that_one_rank_makes_alone_is_found(
    group: Group, tmp_path: Path, call: str, stage: int
) -> None:
    """On one host it may read its peers' memory, and end without them."""
    model, optimizer = _sharded(group, stage)
    _step(model, optimizer)
    error, text = AgreementError, rf"rank 0 has {call}.* at .*\n  rank 1 has"
    if call == "load_state_dict" and stage < 3:
        # Each rank copies to its own whole values, and the next step finds that they differ.
        error, text = SanitizerError, r"rank 0\): .* load_state_dict\(\) inside `if rank == 0:`"
    with pytest.raises(error, match=text):
        if group.rank == 0:
            LONE_CALLS[call](model, optimizer, tmp_path / "run")
        _step(model, optimizer)


PARTS_OF_A_STEP: Final[dict[str, tuple[Any, str]]] = {
    "backward": (
        lambda model, _: model(torch.ones(2, model[0].in_features)).sum().backward(),
        r"rank 0 has (reducing the gradients of|gathering) unit .* rank 1 has optimizer\.step\(\)",
    ),
    "step": (
        lambda _, optimizer: optimizer.step(),
        r"rank 0 has optimizer\.step\(\) at .*\n  rank 1 has (reducing|gathering)",
    ),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("part", PARTS_OF_A_STEP)
def test_a_part_of_a_step_that_one_rank_makes_alone_is_found(
    group: Group, part: str, stage: int
) -> None:
    """With the remedy of uneven batches; and a report has the words of each launch."""
    model, optimizer = _sharded(group, stage)
    _step(model, optimizer)
    call, said = PARTS_OF_A_STEP[part]
    with pytest.raises(
        AgreementError, match=rf"(?s){said}.*the same number of backwards and steps"
    ):
        if group.rank == 0:
            call(model, optimizer)
        _step(model, optimizer)
    launched = [*describe_launches(require_sharded(model).whole).values()]
    compared = {each for each in launched if " of (" in each or each.startswith("optimizer.step()")}
    # On a device more is launched for each comparison, and a report has the last launches only.
    assert len(compared) > 1 or not group.backend.composes_from_peers, launched


def _clip(model: nn.Module, rank: int) -> None:
    if rank == 0:
        clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_lone_call_in_a_function_is_shown_with_its_line(group: Group, stage: int) -> None:
    """All ranks come to the line that calls the function. Batches are not the cause at a step."""
    model, optimizer = _sharded(group, stage)
    _step(model, optimizer)
    model(torch.ones(2, WIDTH)).square().mean().backward()
    line = inspect.getsourcelines(_clip)[1] + 2
    with pytest.raises(AgreementError) as found:
        _clip(model, group.rank)
        optimizer.step()
    one = rf"rank 0 has clip_grad_norm_\(\): .* at \S+:{line} \(called from \S+:\d+\)"
    assert re.search(rf"{one}\n  rank 1 has optimizer\.step\(\) at \S+:\d+\n", str(found.value))
    assert "in clip_grad_norm_(), which must be called on all ranks" in str(found.value)
    assert "batches" not in str(found.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_learning_rate_that_one_rank_changes_is_found(group: Group, stage: int) -> None:
    """Each rank would step its shards by its own."""
    model, optimizer = _sharded(group, stage)
    _step(model, optimizer)
    if group.rank == 1:
        optimizer.param_groups[0]["lr"] *= 0.5
    text = r"param_groups\[0\]\['lr'\] of the optimizer: rank 0 has .*, rank 1 has .*on all ranks"
    with pytest.raises(AgreementError, match=text):
        _step(model, optimizer)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_parameter_that_one_rank_freezes_is_found(group: Group, stage: int, frozen: int) -> None:
    """The mean counts its gradient there as zero; so it trains at a part of its rate."""
    model, optimizer = _sharded(group, stage)
    model[0].weight.requires_grad_(False)
    _step(model, optimizer)
    model[0].weight.requires_grad_(group.rank != frozen)
    text = (
        rf"'0\.weight'\.requires_grad: rank 0 has {bool(frozen)}, rank 1 has {not frozen}, .*rank"
    )
    with pytest.raises(AgreementError, match=text):
        _step(model, optimizer)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_whole_step_that_one_rank_makes_alone_is_shown(group: Group, stage: int) -> None:
    """It pairs with the next step of the others, so that an error comes much later."""
    model, optimizer = _sharded(group, stage)
    logger = logging.getLogger("zero_comm")
    records: list[logging.LogRecord] = []
    logger.addFilter(filtering := lambda record: records.append(record) or True)
    try:
        _step(model, optimizer)
        assert not records
        with pytest.raises(AgreementError) as found:
            if group.rank == 0:
                _step(model, optimizer)
            for _ in range(3):
                _step(model, optimizer)
            zero_engine.full_param(model[0].weight)
    finally:
        logger.removeFilter(filtering)
    said = [record.getMessage() for record in records if "different lines" in record.getMessage()]
    (line,) = said
    first, caller, second, other = re.findall(r"test_sanitize\.py:(\d+)", line)
    assert first == second and int(other) == int(caller) + 2
    said = line.removeprefix("zero_comm: ").removesuffix(", if an error follows")
    assert said in str(found.value)


LOST: Final[dict[str, tuple[Any, str]]] = {
    "params": (SanitizerError, r"unit '.*', parameters .*\(rank \d\).*crc32"),
    "optimizer": ((StoreError, TornStepError), r"optimizer-.*crc32"),
}


@pytest.mark.parametrize("what", LOST)
def test_a_write_that_the_disk_has_lost_is_found(group: Group, tmp_path: Path, what: str) -> None:
    """It reads as the values of a step before."""
    folder = tmp_path / str(group.rank)
    folder.mkdir()
    options: dict[str, Any] = {"read_ahead": 0, "path": folder, "subgroup_bytes": 512}
    offload = Offload(**{what: "disk"}, **options)
    settings = {"offload": offload, "window": 1, "prefetch_numel": 0}
    model, optimizer = _sharded(group, stage=3, num_layers=8, **settings)  # few are read ahead
    _step(model, optimizer)
    dict(optimizer.state.items())  # what is read has been written
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    before = {path: path.read_bytes() for path in files}
    _step(model, optimizer)
    dict(optimizer.state.items())
    for path, content in before.items():
        if path.read_bytes() != content:
            stat = path.stat()
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    error, text = LOST[what]
    with pytest.raises(error) as found:
        _step(model, optimizer)
    assert re.search(text, str(found.value)), str(found.value)
