"""Weights go from files into shards and back: the right elements, or words and nothing done."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import zero_engine
import zero_engine.checkpoint
import zoo
from high_water import HighWater, needs_high_water
from parity import ZeroConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from training import assert_weights_of
from zero_comm import AgreementError, Group, all_gather_json
from zero_comm.testing import equal
from zero_engine import FileError
from zero_partition import LoadError, Precision

MIB = 2**20


class _Model(nn.Module):
    """Tied, frozen, two dtypes, buffers of both kinds, a scalar, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.half = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.rand(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].weight.requires_grad_(False)


def _weights(seed: int = 1) -> dict[str, Tensor]:
    """As `save_file` wants them: one name per tensor."""
    state = parity.build(_Model, seed=seed).state_dict()
    del state["head.weight"]
    state["norm.running_mean"] += 3.0
    state["norm.num_batches_tracked"] += 5
    return {key: value.clone() for key, value in state.items()}


def _written(group: Group, folder: Path, weights: dict[str, Tensor]) -> Path:
    """A file of that name which a folder may have. Collective."""
    path = folder / "model.safetensors"
    parity.by_rank_0(group, lambda: save_file(weights, path))
    return path


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return _Model()


def _prepare(how: str, group: Group) -> nn.Module:
    if how == "init":
        with zero_engine.Init(group=group):
            return _Model()
    if how == "meta":
        return _on_meta()
    model = _Model()
    if how != "plain":
        optimizer = torch.optim.AdamW(model.parameters())
        zero_engine.shard(model, optimizer, ZeroConfig(int(how)), group=group)
    return model


@pytest.mark.parametrize("how", ["meta", "init", "plain", "1", "3"])
def test_files_fill_every_kind_of_model(group: Group, tmp_path: Path, how: str) -> None:
    """One that is sharded, at a stage, or not yet; from a file and from its folder."""
    path, model = _written(group, tmp_path, _weights()), _prepare(how, group)

    report = zero_engine.load_pretrained(model, tmp_path if how == "init" else path, group=group)

    assert (report.missing, report.unexpected) == ((), ())
    _assert_loaded(model, _weights(), group, is_sharded=how in "13")


def _assert_loaded(
    model: nn.Module, expected: dict[str, Tensor], group: Group, *, is_sharded: bool = False
) -> None:
    if not is_sharded:
        zero_engine.shard(model, None, ZeroConfig(3), group=group)
    full = zero_engine.full_state_dict(model)
    if group.rank == 0:
        tied = {**expected, "head.weight": expected["embed.weight"]}
        assert full.keys() == tied.keys()
        parity.assert_same_weights(full, {key: tied[key] for key in full}, what="loaded")


def test_a_rank_reads_its_ranges_only(group: Group, tmp_path: Path) -> None:
    """The point of it: N ranks read the parameters once, not N times."""
    weights = _weights()
    source = _written(group, tmp_path, weights)
    params = {name for name, _ in _Model().named_parameters()}
    buffers = sum(value.nbytes for name, value in weights.items() if name not in params)
    whole = sum(value.nbytes for name, value in weights.items() if name in params)

    read = all_gather_json(_count_reads(group, source), group=group)

    assert sum(read) == whole + 2 * buffers
    assert max(read) < 0.6 * whole + buffers


def _count_reads(group: Group, source: Path) -> int:
    kind = type(next(iter(zero_engine.checkpoint.open_weights(source).values())))
    watched = partial(mock.patch.object, kind, autospec=True)
    with (
        watched("read", side_effect=kind.read) as read,
        watched("read_into", side_effect=kind.read_into) as read_into,
    ):
        zero_engine.load_pretrained(_on_meta(), source, group=group)
    calls = [(reader, stop - start) for reader, start, stop in (c.args for c in read.mock_calls)]
    filled = (call.args for call in read_into.mock_calls)
    calls += [(reader, memory.numel()) for reader, memory, _ in filled]
    return sum(numel * reader.dtype.itemsize for reader, numel in calls)


@pytest.mark.ranks(3)
def test_values_may_come_in_other_float_dtypes_and_under_any_name_of_a_tie(
    group: Group, tmp_path: Path
) -> None:
    """Torch's rule of rounding is the rule. On three ranks the last part is shorter, or empty."""
    weights, dtypes = _weights(), (torch.float16, torch.float64)
    mixed = {
        name: value.to(dtypes[index % 2]) if value.is_floating_point() else value
        for index, (name, value) in enumerate(weights.items())
    }
    other_name = {k: v for k, v in weights.items() if k != "embed.weight"}
    other_name["head.weight"] = weights["embed.weight"]
    both_names = other_name | {"embed.weight": weights["embed.weight"].clone()}
    for given in (mixed, other_name, both_names):
        rounded = {name: value.to(weights.get(name, value).dtype) for name, value in given.items()}
        model = _on_meta()
        zero_engine.load_pretrained(model, _written(group, tmp_path, given), group=group)

        _assert_loaded(model, {name: rounded.get(name, weights[name]) for name in weights}, group)


def _edit(change: Callable[[dict[str, Tensor]], Any]) -> dict[str, Tensor]:
    weights = _weights()
    change(weights)
    return weights


WRONG: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
    (
        lambda w: [w.pop("blocks.1.bias"), w.pop("norm.running_var")],
        r"missing: 'blocks\.1\.bias', 'norm\.running_var'",
    ),
    (lambda w: w.update({"a": torch.ones(1), "b": torch.ones(1)}), "unexpected: 'a', 'b'"),
    (
        lambda w: w.update({f"x{i}": torch.ones(1) for i in range(20)}),
        r"unexpected: 'x0', .*'x15', and 12 more$",
    ),
    (
        lambda w: w.update({"scale": torch.ones(1), "half.bias": torch.ones(4)}),
        r"'half\.bias': expected shape \(3,\), got \(4,\)",
    ),
    (
        lambda w: w.update({"scale": torch.ones((), dtype=torch.int32)}),
        r"'scale': expected torch\.float32, got torch\.int32",
    ),
    (
        lambda w: w.update({"head.weight": torch.ones(11, 7)}),
        r"'embed\.weight' and 'head\.weight' are one tensor, and differ",
    ),
]


@pytest.mark.parametrize("how", ["meta", "3"])
def test_what_does_not_fit_is_named_and_nothing_is_written(
    group: Group, tmp_path: Path, how: str
) -> None:
    """Half a checkpoint in a model is worse than none."""
    torch.manual_seed(0)
    model = _prepare(how, group)
    for change, message in WRONG:
        source = _written(group, tmp_path, _edit(change))
        with pytest.raises(LoadError, match=message):
            zero_engine.load_pretrained(model, source, group=group)

    if how == "meta":
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    else:
        assert_weights_of(model, parity.build(_Model), group=group, what="untouched")


def test_loading_may_leave_names_out(group: Group, tmp_path: Path) -> None:
    """A new head on old weights: `rename` and `strict=False`, on top of initialised values."""
    weights = _edit(lambda w: [w.pop("half.weight"), w.update({"old.head": torch.ones(2)})])
    renamed = {f"base.{name}": value for name, value in weights.items()}
    source = _written(group, tmp_path, renamed)
    torch.manual_seed(0)
    with zero_engine.Init(group=group):
        model = _Model()
    report = zero_engine.load_pretrained(
        model,
        source,
        group=group,
        strict=False,
        rename=lambda name: None if "num_batches" in name else name.removeprefix("base."),
    )

    assert report.missing == ("half.weight", "norm.num_batches_tracked")
    assert report.unexpected == ("old.head",)
    expected = _weights()
    expected["half.weight"] = parity.build(_Model).state_dict()["half.weight"]
    expected["norm.num_batches_tracked"] -= 5
    _assert_loaded(model, expected, group)


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.frequencies.copy_(torch.arange(4.0))


def test_a_buffer_that_no_file_has_is_refused_by_name(group: Group, tmp_path: Path) -> None:
    """The table of rotary positions, on meta, would be junk; materialise() first fills it."""
    source = _written(group, tmp_path, _Rotary().state_dict())
    with torch.device("meta"):
        model = _Rotary()
    with pytest.raises(LoadError, match=r"'frequencies': on the meta device.*materialise"):
        zero_engine.load_pretrained(model, source, group=group)

    zero_engine.materialise(model, group=group)
    zero_engine.load_pretrained(model, source, group=group)
    assert equal(model.frequencies, torch.arange(4.0))


def test_ranks_with_different_files_are_told(group: Group, tmp_path: Path) -> None:
    """A stale copy on one host would be a model that no file holds."""
    name, path = ("scale", "half.bias")[group.rank], tmp_path / f"{group.rank}.safetensors"
    save_file(_edit(lambda w: w.pop(name)), path)
    with pytest.raises(AgreementError, match="weights to load"):
        zero_engine.load_pretrained(_Model(), path, group=group)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.ranks(timeout_s=90.0)
def test_hugging_faces_folders_go_straight_into_shards_and_come_out_again(
    group: Group, tmp_path: Path, name: str
) -> None:
    """As it writes them, with embeddings tied (GPT-2) and not: many files, an index, its names."""
    transformers = pytest.importorskip("transformers")
    saved = parity.build(zoo.ZOO[name].make, seed=1)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    parity.by_rank_0(group, lambda: saved.save_pretrained(theirs, max_shard_size="8KB"))
    assert (theirs / "model.safetensors.index.json").exists()
    with zero_engine.Init(group=group):
        model = parity.build(zoo.ZOO[name].make)
    zero_engine.load_pretrained(model, theirs, group=group)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    assert_weights_of(model, saved, group=group, what="loaded")

    zero_engine.save(tmp_path / "checkpoints", model, step=0)
    if group.rank:
        return
    zero_engine.export(tmp_path / "checkpoints", ours, max_shard_bytes=8000)
    assert (ours / "model.safetensors.index.json").exists()
    saved.config.save_pretrained(ours)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        ours, output_loading_info=True, local_files_only=True
    )
    assert not any(report.values())
    parity.assert_same_weights(dict(loaded.state_dict()), saved.state_dict(), what=name)


# ---- Export of what was saved in shards ----


def _read(folder: Path) -> dict[str, Tensor]:
    readers = zero_engine.checkpoint.open_weights(folder)
    return {name: reader.whole() for name, reader in readers.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_saved_in_shards_is_exported_whole(
    group: Group, tmp_path: Path, stage: int
) -> None:
    """From pieces of two ranks; a part of a model is not exported as one."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    zero_engine.save(tmp_path / "saved", model, optimizer, step=2)
    zero_engine.save(tmp_path / "part", model, optimizer, step=2, exclude_frozen=True)
    expected = dict(zero_engine.full_state_dict(model))
    if group.rank:
        return

    zero_engine.export(tmp_path / "saved", tmp_path / "out", max_shard_bytes=500)

    del expected["head.weight"]
    found = _read(tmp_path / "out")
    assert found.keys() == expected.keys()
    parity.assert_same_weights({n: found[n] for n in expected}, expected, what="exported")
    with pytest.raises(FileError, match="exclude_frozen"):
        zero_engine.export(tmp_path / "part", tmp_path / "whole")


def test_masters_are_exported_and_round_to_what_was_computed_with(
    group: Group, tmp_path: Path
) -> None:
    """Those who go on training want the masters; those who publish, the dtype of the model."""
    config = ZeroConfig(3, precision=Precision(params=torch.bfloat16))
    model, optimizer = parity.build_sharded(group, config, make=parity.tiny_float32)
    zero_engine.save(tmp_path / "saved", model, optimizer, step=2)
    expected = zero_engine.full_state_dict(model)
    if group.rank:
        return

    zero_engine.export(tmp_path / "saved", tmp_path / "whole")
    zero_engine.export(tmp_path / "saved", tmp_path / "half", dtype=torch.bfloat16)

    masters, halves = _read(tmp_path / "whole"), _read(tmp_path / "half")
    assert masters["scale"].dtype == torch.float32
    for name, value in halves.items():
        assert value.dtype == torch.bfloat16, name
        assert equal(value, expected[name].bfloat16()), name
        assert equal(value, masters[name].bfloat16()), name
    assert any(not equal(masters[n].bfloat16().float(), masters[n]) for n in masters)


@needs_high_water
@pytest.mark.ranks(1)
def test_memory_of_an_export_does_not_grow_with_the_model(group: Group, tmp_path: Path) -> None:
    """The machine that publishes a model is not the one that trained it."""
    model = nn.ModuleList(nn.Linear(2**12, 2560, bias=False) for _ in range(3))
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    zero_engine.save(tmp_path / "saved", model, step=0)
    mark = HighWater()

    report = zero_engine.export(tmp_path / "saved", tmp_path / "out", max_shard_bytes=10**8)

    assert mark.rise_bytes() < 32 * MIB
    assert report.num_bytes > 120 * MIB


@needs_high_water
@pytest.mark.parametrize("shape", [(2**23, 1), (1, 2**23)], ids=["tall", "wide"])
@pytest.mark.ranks(1)
def test_reading_a_part_takes_the_memory_of_the_part(group: Group, tmp_path: Path, shape) -> None:
    """A tensor is as large as all memory, or is one row, or has a row per element."""
    save_file({"a": torch.ones(shape)}, tmp_path / "model.safetensors")
    reader = zero_engine.checkpoint.open_weights(tmp_path)["a"]
    out = torch.zeros(2**20)
    reader.read(0, 1)
    high_water = HighWater()
    for start in range(0, 2**23, 2**20):
        out.copy_(reader.read(start, start + 2**20))

    assert high_water.rise_bytes() <= 14 * MIB  # 4 are kept, a part or two mapped; of 32
