"""What is saved, what is refused at load, and what neither costs."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import random
import re
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import parity
import pytest
import torch
import zero_ckpt
import zero_engine
import zero_offload
from deepspeed_folders import Form, save_as_deepspeed
from high_water import HighWater, needs_high_water
from parity import ZeroConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from zero_comm import AgreementError, Group
from zero_comm.testing import RankPool, assert_close, equal, on_cpu
from zero_engine import ConfigError, FileError, Offload
from zero_engine.testing import MANIFEST, damage, edit_manifest, write_manifest
from zero_partition import LoadError, StateError, full_optimizer_state

pytestmark = pytest.mark.xdist_group("ranks")

MIB = 2**20


def _build(group: Group, stage: int = 3) -> tuple[nn.Module, Any]:
    return parity.build_sharded(group, ZeroConfig(stage))


def _train_and_save(group: Group, folder: Path) -> tuple[nn.Module, Any, Path]:
    """Two steps; returns the folder of the checkpoint too. Collective."""
    model, optimizer = _build(group)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    return model, optimizer, zero_engine.save(folder, model, optimizer, step=2).path


def _values(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All that a load may change. Collective."""
    values = {name: zero_engine.full_param(p) for name, p in model.named_parameters()}
    for name, param in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            with suppress(StateError):  # there is none
                values[f"{name}.{key}"] = full_optimizer_state(param, key)
    return values | {name: buffer.clone() for name, buffer in model.named_buffers()}


_assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


# ---- What is saved ----


def test_a_model_that_was_never_stepped_is_saved_and_loaded(group: Group, tmp_path: Path) -> None:
    """The first checkpoint of a job, and the one that it makes right after it has resumed."""
    model, optimizer = _build(group)
    zero_engine.save(tmp_path, model, optimizer, step=0)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    again, its = _build(group, 2)
    parity.run_steps(again, its, range(7, 9), rank=group.rank)
    parity.loss_of(again, parity.batch(9, 0, group.rank)).backward()  # which is dropped

    report = zero_engine.load(tmp_path, again, its)
    zero_engine.save(tmp_path, again, its, step=1)

    assert str(report).startswith(f"restored {report.num_tensors} of {report.num_tensors} tensors")
    assert not its.state  # moments of its own first steps are gone
    parity.run_steps(again, its, range(2), rank=group.rank)
    _assert_same(_values(again, its), _values(model, optimizer))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("sync", [True, False])
def test_gradients_that_wait_for_a_step_are_not_saved_and_named(
    group: Group, tmp_path: Path, stage: int, sync: bool
) -> None:
    """The run that resumes begins the step anew. Folders above that of the run are made."""
    folder = tmp_path / "runs" / "first"
    model, optimizer = _build(group, stage)

    def run_backward() -> None:
        with nullcontext() if sync else zero_engine.no_sync(model):
            parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()

    run_backward()
    optimizer.zero_grad()
    zero_engine.save(folder, model, optimizer, step=1)
    run_backward()
    optimizer.step()
    zero_engine.save(folder, model, optimizer, step=2)
    with torch.no_grad():
        parity.loss_of(model, parity.batch(0, 0, group.rank))
    zero_engine.save(folder, model, optimizer, step=3)
    run_backward()
    with pytest.warns(UserWarning, match="gradients are not saved"):
        zero_engine.save(folder, model, optimizer, step=4)

    again, its = _build(group, 2)
    zero_engine.load(folder, again, its)
    assert all(param.grad is None for param in again.parameters())
    _assert_same(_values(again, its), _values(model, optimizer))


def test_weights_alone_are_saved_without_an_optimizer(group: Group, tmp_path: Path) -> None:
    """An evaluation saves nothing else, and loads nothing else of what a training has saved."""
    model, optimizer, _ = _train_and_save(group, tmp_path)
    zero_engine.save(tmp_path, model, step=3)
    bare, _ = zero_engine.shard(parity.build(seed=3), None, ZeroConfig(3), group=group)

    zero_engine.load(tmp_path, bare)

    parity.assert_same_weights(
        zero_engine.full_state_dict(bare), zero_engine.full_state_dict(model), what="weights"
    )
    with pytest.raises(LoadError, match="it was saved without an optimizer"):
        zero_engine.load(tmp_path, model, optimizer)


def test_frozen_parameters_are_written_once(group: Group, tmp_path: Path) -> None:
    """An adapter of a large model would save the large model with each of its checkpoints."""
    model, optimizer = _build(group)
    inodes = []
    for step in range(3):
        report = zero_engine.save(tmp_path, model, optimizer, step=step, keep=2)
        files = sorted(report.path.glob("frozen-*"))
        inodes.append([file.stat().st_ino for file in files])
        assert (report.linked_bytes > 0) == (step > 0 and f"frozen-{group.rank:05}" in str(files))
    assert inodes[0] == inodes[1] == inodes[2] and inodes[0]

    zero_engine.set_full_param(model.frozen, torch.full_like(model.frozen, 5.0))
    changed = zero_engine.save(tmp_path, model, optimizer, step=3)
    assert [file.stat().st_ino for file in sorted(changed.path.glob("frozen-*"))] != inodes[0]
    zero_engine.save(tmp_path, model, optimizer, step=4, exclude_frozen=True)
    if group.rank == 0:
        adapters = tmp_path / "adapter_model.safetensors"  # as in a Trainer's checkpoint
        for said in ("export what was saved", f"The adapters are in {adapters}"):
            with pytest.raises(FileError, match=rf"exclude_frozen=True.*{re.escape(said)}$"):
                zero_engine.export(tmp_path, tmp_path / "out")
            adapters.touch()
    again, its = _build(group)
    with torch.no_grad():
        zero_engine.set_full_param(again.frozen, torch.full_like(again.frozen, 7.0))
    zero_engine.load(tmp_path, again, its)
    assert (zero_engine.full_param(again.frozen) == 7.0).all()
    zero_engine.load(tmp_path, again, its, tag="step-3")
    assert (zero_engine.full_param(again.frozen) == 5.0).all()


def _draw() -> list[float]:
    tracker = zero_ckpt.get_cuda_rng_tracker()
    with tracker.fork("dropout"):
        forked = torch.rand(2).tolist()
    return [*forked, *torch.rand(2).tolist(), random.random(), random.gauss(0, 1), np.random.rand()]


def test_what_each_rank_has_of_its_own_comes_back(group: Group, tmp_path: Path) -> None:
    """Batch norm's statistics; Python's and numpy's random numbers, and a tracker's."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(50 + group.rank)
    tracker = zero_ckpt.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("dropout", 60 + group.rank)
    _draw()
    model, _ = zero_engine.shard(nn.BatchNorm1d(4), None, ZeroConfig(3), group=group)
    model.running_mean.fill_(group.rank + 1)
    zero_engine.save(tmp_path, model, step=0)
    expected = _draw()
    tracker.reset()
    model.running_mean.zero_()

    assert zero_engine.load(tmp_path, model, restores_rngs=False).restores_rngs is False
    assert not tracker.is_initialized()
    assert (model.running_mean == group.rank + 1).all()
    assert zero_engine.load(tmp_path, model).restores_rngs is True
    assert _draw() == expected
    tracker.reset()


# ---- State of other shapes than the parameter's ----


class _Warm(parity.PerParameter):
    """Momentum, warmed up by values for the whole parameter of all the shapes that one can have."""

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(param)
            state |= {"one": torch.zeros(1), "cell": torch.ones(1, 1), "past": [0.5], "none": None}
        state["one"] += 0.25
        state["cell"] *= 0.9
        state["past"] = [*state["past"][-1:], state["past"][-1] + state["one"].item()]
        state["momentum"].mul_(0.9).add_(grad)
        lr = group["lr"] * state["cell"].item() * sum(state["past"])
        param.sub_(lr * state["momentum"])


class _Counts(parity.PerParameter):
    """As Adam-mini: a rank that keeps nothing of a parameter has numbers of its own for it."""

    needs_cut = "tensor"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            self.state[param].setdefault("count", 0)
        super().step(closure)

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        state["count"] += 1
        param.sub_(grad * group["lr"] / state["count"])


class _FactorsLarge(parity.PerParameter):
    """As many: entries of a large parameter have other names than those of a small one."""

    needs_cut = "tensor"

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        name = "large" if param.numel() > 8 else "small"
        state.setdefault(name, torch.zeros_like(param)).add_(grad)
        param.sub_(group["lr"] * state[name])


class _Listed(parity.PerParameter):
    """Keeps two momenta in one list, and its last three steps: shapes that no cut explains."""

    needs_cut = "flat"

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        if not state:
            state["momenta"] = [torch.zeros_like(param) for _ in range(2)]
            state["past"] = torch.ones(3, device=param.device)
            state["mean"] = torch.zeros_like(param)
        state["past"] = torch.cat([state["past"][1:], state["past"][:1] * 0.5])
        state["mean"].mul_(0.9).add_(grad, alpha=0.1)
        for index, momentum in enumerate(state["momenta"]):
            momentum.mul_(0.5 + index / 4).add_(grad)
            param.sub_(group["lr"] * state["past"][-1] * (momentum + state["mean"]))


OPTIMIZERS: Any = {  # of all that trains
    "rows and whole tensors": lambda params: zero_engine.ChainedOptimizer(
        torch.optim.Muon([p for p in params if p.dim() == 2][:2], lr=1e-2),
        torch.optim.Adafactor([p for p in params if p.dim() == 2][2:], lr=1e-2),
        torch.optim.AdamW([p for p in params if p.dim() != 2], lr=1e-2),
    ),
    "one element": partial(_Warm, lr=1e-2),
    "numbers of idle ranks": partial(_Counts, lr=1e-2),
    "names by size": partial(_FactorsLarge, lr=1e-2),
    "lists": partial(_Listed, lr=1e-2),
}


def _build_of(name: str) -> tuple[nn.Module, Any]:
    model = parity.build(parity.tiny_float32)
    return model, OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])


def _shard_of(group: Group, name: str, stage: int, place: str = "device") -> tuple[nn.Module, Any]:
    config = ZeroConfig(stage, offload=Offload(optimizer=place))
    return zero_engine.shard(*_build_of(name), config, group=group)


def _states(model: nn.Module, optimizer: Any) -> list[dict[str, Any]]:
    chained = getattr(optimizer, "optimizers", [optimizer])
    known = {param: state for each in chained for param, state in each.state.items()}
    return [known.get(param, {}) for param in model.parameters()]


@pytest.mark.parametrize(
    "name", ["rows and whole tensors", "one element", "numbers of idle ranks", "names by size"]
)
def test_state_of_any_shape_goes_on(ranks, tmp_path: Path, name: str) -> None:
    """As a process alone has it: it trains, so it goes on, is read, and is undone."""
    [expected] = ranks(1).run(_train_shapes, name=name)
    ranks(2).run(_save_shapes, folder=tmp_path, name=name)
    for world_size, stage, saved, place in (
        (1, 3, "stage 1", "host"),
        (2, 0, "stage 3", "device"),
        (3, 2, "stage 3", "host"),
    ):
        build = {"name": name, "stage": stage, "place": place}
        folder = tmp_path / saved
        ranks(world_size).run(_load_shapes, folder=folder, build=build, expected=expected)


def _train_shapes(_: Group, name: str) -> tuple[list[float], Any]:
    model, optimizer = _build_of(name)
    parity.run_steps(model, optimizer, range(2), rank=0)
    states = copy.deepcopy(_states(model, optimizer))
    return parity.run_steps(model, optimizer, range(2, 5), rank=0), on_cpu(states)


def _save_shapes(group: Group, folder: Path, name: str) -> None:
    for stage, place in ((1, "device"), (3, "host")):
        model, optimizer = _shard_of(group, name, stage, place)
        parity.run_steps(model, optimizer, range(2), rank=0)
        zero_engine.save(folder / f"stage {stage}", model, optimizer, step=2)


def _load_shapes(group: Group, folder: Path, build: Any, expected: Any) -> None:
    losses, states = pytest.approx(expected[0]), expected[1]
    model, optimizer = _shard_of(group, **build)
    report = zero_engine.load(folder, model, optimizer)
    assert report.num_tensors == report.num_tensors_saved
    for param, state in zip(model.parameters(), states, strict=True):
        assert_close({key: full_optimizer_state(param, key) for key in state}, state)
    assert parity.run_steps(model, optimizer, range(2, 5), rank=0) == losses
    zero_engine.load(folder, model, optimizer)
    zero_engine.unshard(model, optimizer)
    assert_close(_states(model, optimizer), states)
    zero_engine.shard(model, optimizer, ZeroConfig(build["stage"]), group=group)
    assert parity.run_steps(model, optimizer, range(2, 5), rank=0) == losses


def test_state_without_a_whole_goes_on_at_the_same_world_size(ranks, tmp_path: Path) -> None:
    """What trains is saved: a rank gets what one with the same elements had, or begins anew."""
    ranks(2).run(_resume_listed, folder=tmp_path)
    ranks(3).run(_begin_listed_anew, folder=tmp_path)


def _resume_listed(group: Group, folder: Path) -> None:
    model, optimizer = _shard_of(group, "lists", 3)
    parity.run_steps(model, optimizer, range(3), rank=group.rank)
    zero_engine.save(folder, model, optimizer, step=3)
    expected = parity.run_steps(model, optimizer, range(3, 6), rank=group.rank)
    for place in ("device", "host"):
        model, optimizer = _shard_of(group, "lists", 3, place)
        for _ in range(2):  # into nothing, and over what is there
            report = zero_engine.load(folder, model, optimizer)
            assert report.begins_anew == ()
            found = parity.run_steps(model, optimizer, range(3, 6), rank=group.rank)
            assert found == expected
    with pytest.raises(StateError, match="'momenta' has no whole"):
        zero_engine.full_optimizer_state_dict(model)


def _begin_listed_anew(group: Group, folder: Path) -> None:
    model, optimizer = _shard_of(group, "lists", 2)
    report = zero_engine.load(folder, model, optimizer)
    # What is so small that one rank has all of it, before and now, goes on.
    cut = {name: param for name, param in model.named_parameters() if param.numel() > 64}
    for name, param in cut.items():
        begins = f"optimizer state of {name!r}: 'momenta', 'past' of it"
        assert any(problem.startswith(begins) for problem in report.begins_anew), report
        with pytest.raises(StateError):
            zero_engine.local_optimizer_state(param, "past")
    assert all("blocks.0.norm.weight" not in problem for problem in report.begins_anew)
    optimizer.state.clear()
    losses = parity.run_steps(model, optimizer, range(3, 5), rank=group.rank)

    zero_engine.load(folder, model)  # the same weights, and state that was never there
    fresh, optimizer = _shard_of(group, "lists", 2)
    zero_engine.load(folder, fresh)
    assert parity.run_steps(fresh, optimizer, range(3, 5), rank=group.rank) == losses


# ---- Files ----


def test_files_are_safetensors_and_json(group: Group, tmp_path: Path) -> None:
    """Whoever has lost this library must get at the values all the same."""
    model, optimizer, path = _train_and_save(group, tmp_path)
    expected = _values(model, optimizer)
    said = json.loads((path / MANIFEST).read_text())
    for name in ("embed.weight", "blocks.1.up.weight", "frozen", "adapter.weight"):
        tensor = said["params"][name]
        parts = [load_file(path / piece["file"])[piece["key"]] for piece in tensor["pieces"]]
        assert equal(torch.cat(parts).view(tensor["shape"]), expected[name])
    assert said["ties"] == {"head.weight": "embed.weight"}
    assert "head.weight" not in said["params"]


# ---- What is refused ----


def test_a_planted_pickle_is_never_executed(tmp_path: Path) -> None:
    """Checkpoints are downloaded."""
    saved, planted = tmp_path / "saved", tmp_path / "executed"
    model, optimizer, path = _train_and_save(Group.solo(), saved)
    content = f"cos\nmkdir\n(V{planted}\ntR.".encode()  # calls os.mkdir
    for name in ("rank-00000-00.pt", "extra.pkl", ".metadata", "mp_rank_00_model_states.pt"):
        (path / name).write_bytes(content)
    assert zero_engine.load(saved, model, optimizer) is not None
    for file in (*path.glob("rank-*.safetensors"), path / MANIFEST):
        file.write_bytes(content)
        with pytest.raises(FileError, match=f"{file.name}.* damaged"):
            zero_engine.load(saved, model, optimizer)

    assert not planted.exists()
    pickle.loads(content)
    assert planted.exists()  # it would have


def _rename(said: Any) -> None:
    said["params"]["other"] = said["params"].pop("scale")


def _rename_all(said: Any, prefix: str) -> None:
    for each in ("params", "buffers"):
        said[each] = {prefix + name: value for name, value in said[each].items()}


MISFITS: Any = {  # what is done to a manifest, and said
    _rename: r"written: these are weights of another .*; missing: 'scale'; unexpected: 'other'",
    partial(_rename_all, prefix="module."): (
        "begin with 'module.', the model's do not: DistributedDataParallel adds it, remove it; mis"
    ),
    partial(_rename_all, prefix="net."): "weights begin with 'net.', the model's do not; missing: ",
    lambda said: said["params"]["embed.weight"].update(shape=[6, 11]): (
        r"'embed.weight': expected shape \(11, 6\), got \(6, 11\)"
    ),
    lambda said: said["optimizer"]["embed.weight"].pop("exp_avg_sq"): (
        "optimizer state of 'embed.weight' lacks exp_avg_sq; is it of another optimizer"
    ),
    lambda said: said["param_groups"][0]["params"].pop(): (
        r"param group 0: expected also \['.*'\]; is it"
    ),
    lambda said: said["params"]["scale"].update(dtype="int32"): (
        "'scale': expected torch.float32, got torch.int32"
    ),
    lambda said: [
        said["ties"].clear(),
        said["params"].update({"head.weight": said["params"]["embed.weight"]}),
    ]: "'embed.weight' and 'head.weight' are one tensor here, and 2 there",
}


def test_what_does_not_fit_or_is_damaged_is_named_and_nothing_is_written(
    group: Group, tmp_path: Path
) -> None:
    """A restore that leaves out a moment trains on, and is wrong.

    Of files, only the rank that checks one has seen the flipped byte.
    """
    model, optimizer, path = _train_and_save(group, tmp_path)
    spoils: list[Any] = [
        (file, partial(damage, file), FileError, r"rank-0000\d-00.safetensors: expected .* bytes")
        for file in (path / f"rank-0000{rank}-00.safetensors" for rank in range(2))
    ]
    spoils += [
        (path / MANIFEST, partial(edit_manifest, path, change), LoadError, message)
        for change, message in MISFITS.items()
    ]
    parity.run_steps(model, optimizer, range(2, 3), rank=group.rank)
    before = _values(model, optimizer)
    whole = zero_engine.load(tmp_path, *_build(group))
    for file, spoil, error, message in spoils:
        was = parity.by_rank_0(group, file.read_bytes)
        parity.by_rank_0(group, spoil)

        with pytest.raises(error, match=message):
            zero_engine.load(tmp_path, model, optimizer)

        _assert_same(_values(model, optimizer), before, msg=message)
        parity.by_rank_0(group, partial(file.write_bytes, was))

    parity.by_rank_0(group, lambda: edit_manifest(path, _rename))
    report = zero_engine.load(tmp_path, model, optimizer, is_strict=False)
    assert (report.missing, report.unexpected) == (("scale",), ("other",))
    assert report.num_tensors == report.num_tensors_saved - 1
    assert report.num_bytes == whole.num_bytes - before["scale"].nbytes
    assert equal(zero_engine.full_param(model.scale), before["scale"])


def test_of_a_damaged_newest_the_tags_that_load_are_named_and_the_next_save_replaces_it(
    group: Group, tmp_path: Path
) -> None:
    """Who finds a job stopped at night wants to know where it can go on."""
    model, optimizer = _build(group)
    for step in range(5):
        path = zero_engine.save(tmp_path, model, optimizer, step=step).path
    absent, too_short = (next((tmp_path / f"step-{n}").glob("rank-*")) for n in (0, 2))
    parity.by_rank_0(group, absent.unlink)
    parity.by_rank_0(group, partial(os.truncate, too_short, 10))
    manifest, file = path / MANIFEST, path / "rank-00000-00.safetensors"
    for spoil in (partial(damage, file), partial(os.truncate, manifest, 10), manifest.unlink):
        parity.by_rank_0(group, spoil)

        for tag in (None, "step-4"):
            with pytest.raises(FileError, match=r"step-4/.*with tag='step-3' or 'step-1'$"):
                zero_engine.load(tmp_path, model, optimizer, tag=tag)

        assert zero_engine.load(tmp_path, model, optimizer, tag="step-3").step == 3
        zero_engine.save(tmp_path, model, optimizer, step=4)
        assert zero_engine.load(tmp_path, model, optimizer).step == 4
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]

    notes = tmp_path / "step-5" / "notes"  # somebody else's
    parity.by_rank_0(group, lambda: [notes.parent.mkdir(), notes.touch()])
    with pytest.raises(FileError, match="choose another tag, or remove it"):
        zero_engine.save(tmp_path, model, optimizer, step=5)
    assert notes.exists()


def test_a_path_that_is_no_run_is_named_with_what_to_call(tmp_path: Path) -> None:
    """Training began from scratch, without a word, for a typo."""
    group, run = Group.solo(), tmp_path / "run"
    model, optimizer = _build(group)
    path = zero_engine.save(run, model, optimizer, step=2).path
    for name in ("empty", "weights", "aside", "bare/one", "dead/.one.partial-12"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bare" / "one" / "rank-00000.safetensors").touch()
    write_manifest(tmp_path / "dead" / ".one.partial-12", {})
    (tmp_path / "dead" / "latest").write_text("one")
    save_file({"scale": torch.ones(1)}, tmp_path / "weights" / "model.safetensors")
    zero_engine.save(tmp_path / "aside", model, optimizer, step=1, is_latest=False)
    plain, its = parity.build_with_optimizer()
    save_as_deepspeed(tmp_path / "theirs", plain, its, step=3, form=Form(stage=3, world_size=2))
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    zero = tmp_path / "of stage 0" / "global_step1"
    zero.mkdir(parents=True)
    torch.save({"module": {}}, zero / "mp_rank_00_model_states.pt")  # all that its stage 0 writes
    wrong = {
        zero.parent: r"which DeepSpeed saved; call load_deepspeed\(folder",
        path: r"the folder of one of them.* pass '.*/run' and tag='step-2'",
        path / MANIFEST: r"the file .*manifest\.json; load_pretrained",
        tmp_path / "weights": r"load_pretrained\(model, folder\)",
        adapters: r"peft saved adapters; .* peft.set_peft_model_state_dict",
        tmp_path / "theirs": r"which DeepSpeed saved; call load_deepspeed\(folder",
        tmp_path / "theirs" / "global_step3": r"call load_deepspeed\(folder",
    }
    absent = {
        tmp_path / "rum": r"rum: no such folder; did you mean 'run'\?",
        tmp_path / "other": "other: no such folder; pass missing_ok=True",
        **{
            tmp_path / name: "contains no complete checkpoint; pass missing_ok=True"
            for name in ("empty", "bare", "dead")
        },
        tmp_path / "aside": "contains no complete checkpoint but 'step-1', to be named by tag",
    }

    for folder, message in (wrong | absent).items():
        with pytest.raises(FileError, match=message):
            zero_engine.load(folder, model, optimizer)
    for folder, message in wrong.items():
        with pytest.raises(FileError, match=message):
            zero_engine.load(folder, model, optimizer, missing_ok=True)
    for folder in absent:
        assert zero_engine.load(folder, model, optimizer, missing_ok=True) is None
    with pytest.raises(FileError, match="expected a checkpoint 'step-3', found 'step-2'"):
        zero_engine.load(run, model, optimizer, tag="step-3", missing_ok=True)

    # The folder above, and two above, as Trainer's.
    (tmp_path / "job" / "checkpoint-2").mkdir(parents=True)
    run.rename(tmp_path / "job" / "checkpoint-2" / "zero")
    adapters.rename(tmp_path / "job" / "checkpoint-2" / "adapters")
    (tmp_path / "job" / "checkpoint-2" / "adapter_config.json").touch()
    for folder in (tmp_path / "job" / "checkpoint-2", tmp_path / "job"):
        message = "no complete checkpoint, but the folder '.*job/checkpoint-2/zero' does"
        with pytest.raises(FileError, match=message):
            zero_engine.load(folder, model, optimizer)
        with pytest.warns(UserWarning, match=rf"{message}; pass that one. Nothing was loaded"):
            assert zero_engine.load(folder, model, optimizer, missing_ok=True) is None


def test_a_folder_that_nobody_may_read_is_passed_over(tmp_path: Path) -> None:
    """A file system has "lost+found", and the first start of a job looks beside it."""
    model, optimizer = _build(Group.solo())
    (tmp_path / "lost+found").mkdir()
    lists = Path.iterdir

    def iterdir(path: Path) -> Any:
        if path.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return lists(path)

    with mock.patch.object(Path, "iterdir", iterdir):
        assert zero_engine.load(tmp_path, model, optimizer, missing_ok=True) is None
        for folder in (tmp_path, tmp_path / "run"):
            with pytest.raises(FileError, match="pass missing_ok=True"):
                zero_engine.load(folder, model, optimizer)


def test_wrong_calls_say_what_to_do(tmp_path: Path) -> None:
    """A plain model, a foreign optimizer, a tag that is a path, a state that is an object."""
    model, optimizer = _build(Group.solo())
    plain, its = parity.build_with_optimizer()
    with pytest.raises(StateError, match=r"call zero_engine\.shard"):
        zero_engine.save(tmp_path, plain, its, step=0)
    with pytest.raises(StateError, match="pass what shard\\(\\) returned"):
        zero_engine.load(tmp_path, model, its)
    for tag in ("a/b", "..", ".x", "latest", "", 3, "a\0b", 300 * "a", 101 * "ä"):
        with pytest.raises(ConfigError, match="tag: expected"):
            zero_engine.save(tmp_path, model, optimizer, step=0, tag=tag)
    for folder in ("", None, 3):
        with pytest.raises(ConfigError, match="path of a folder"):
            zero_engine.save(folder, model, optimizer, step=0)
        with pytest.raises(ConfigError, match="load\\(\\): expected"):
            zero_engine.load(folder, model, optimizer)
    with pytest.raises(ConfigError, match="step to be an int"):
        zero_engine.save(tmp_path, model, optimizer, step=1.5)
    for keep in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="keep to be an int from 1"):
            zero_engine.save(tmp_path, model, optimizer, step=0, keep=keep)
    with pytest.raises(ConfigError, match="would have to be pickled"):
        zero_engine.save(tmp_path, model, optimizer, step=0, extra=object())
    assert not list(tmp_path.iterdir())


def test_ranks_that_differ_are_told(group: Group, tmp_path: Path) -> None:
    """Half of a checkpoint in one folder and half in another is none."""
    model, optimizer = _build(group)
    with pytest.raises(AgreementError, match=r"tag: rank 0 has step-0, rank 1 has step-1"):
        zero_engine.save(tmp_path, model, optimizer, step=0, tag=f"step-{group.rank}")
    zero_engine.save(tmp_path, model, optimizer, step=0)
    own = tmp_path if group.rank else tmp_path / "no"  # as on a node without the shared disk
    with pytest.raises(FileError, match="no such folder"):
        zero_engine.load(own, model, optimizer)
    with pytest.raises(AgreementError, match=r"checkpoint: rank 0 has none, rank 1 has step-0"):
        zero_engine.load(own, model, optimizer, missing_ok=True)


# ---- What it costs ----


@needs_high_water
@pytest.mark.parametrize("where", ["device", "disk"])
def test_neither_holds_more_than_two_buffers(tmp_path: Path, where: str) -> None:
    """A job that fits when it trains must fit when it saves, and when it resumes.

    Of a rank that has done nothing before: its allocator has no holes.
    """
    with RankPool(1) as fresh:
        ((saved, saving, loading),) = fresh.run(_measure_saving, folder=str(tmp_path), where=where)

    # Two batches of 16 MiB, and a sub-group that is read from the disk.
    most = (34 + 8 * (where == "disk")) * MIB
    assert saved > 96 * MIB
    assert saving <= most, f"{saving / MIB:.1f} MiB"
    assert loading <= most, f"{loading / MIB:.1f} MiB"


def _measure_saving(group: Group, folder: str, where: str) -> tuple[int, int, int]:
    """Return bytes of a checkpoint, and by how much memory rose at most in saving and loading."""
    model = parity.Chain(8, 1024)  # 32 MiB, and 64 MiB of moments
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    path = Path(folder)
    offload = Offload(optimizer="disk", path=path, subgroup_bytes=8 * MIB)
    config = ZeroConfig(3, offload=offload if where == "disk" else None)
    zero_engine.shard(model, optimizer, config, group=group)
    for _ in range(2):
        parity.finish_step(model(torch.randn(2, 1024)).sum(), optimizer)
    for step in range(2):  # the first time imports and warms up
        mark = HighWater()
        report = zero_engine.save(path / "saved", model, optimizer, step=step)
        saving = mark.rise_bytes()
        mark = HighWater()
        zero_engine.load(path / "saved", model, optimizer)
        loading = mark.rise_bytes()
    return report.num_bytes, saving, loading


def test_a_report_counts_tensors_without_elements(tmp_path: Path) -> None:
    """No file has a piece of them, and the manifest has them all the same."""
    model = nn.Linear(3, 3)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    zero_engine.shard(model, optimizer, ZeroConfig(2))
    (model(torch.ones(2, 3)).sum() + model.empty.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = zero_engine.save(tmp_path, model, optimizer, step=1)
    loaded = zero_engine.load(tmp_path, model, optimizer)
    assert loaded is not None
    assert saved.num_tensors == loaded.num_tensors == 3 * 4  # values, step and two moments


# ---- Another optimizer ----

SGD: Final = partial(torch.optim.SGD, lr=0.1)
OTHERS: Final[dict[str, tuple[Any, Any, str]]] = {
    "AdamW-SGD": (torch.optim.AdamW, SGD, "has exp_avg, exp_avg_sq, step; is it of .* than SGD"),
    "AdamW-momentum": (torch.optim.AdamW, partial(SGD, momentum=0.9), "has exp_avg, exp_avg_sq, "),
    "momentum-AdamW": (partial(SGD, momentum=0.9), torch.optim.AdamW, "lacks exp_avg, exp_avg_sq"),
    "AdamW-Lion": (torch.optim.AdamW, zero_offload.CPULion, "has exp_avg_sq; is it of another"),
    "AdamW-Adagrad": (torch.optim.AdamW, torch.optim.Adagrad, "lacks sum and has exp_avg, exp_av"),
    "AdamW-Adafactor": (torch.optim.AdamW, torch.optim.Adafactor, "has exp_avg, exp_avg_sq; is"),
    "AdamW-NAdam": (torch.optim.AdamW, torch.optim.NAdam, "lacks mu_product; is it of another"),
}
ALIKE: Final[dict[str, tuple[Any, Any]]] = {
    "AdamW-amsgrad": (partial(torch.optim.AdamW, amsgrad=True), torch.optim.AdamW),
    "Adam-AdamW": (torch.optim.Adam, torch.optim.AdamW),
    "AdamW-CPUAdam": (torch.optim.AdamW, zero_offload.CPUAdam),
    "CPUAdam-AdamW": (zero_offload.CPUAdam, torch.optim.AdamW),
    "momentum-SGD": (partial(SGD, momentum=0.9), SGD),
    "SGD-momentum": (SGD, partial(SGD, momentum=0.9)),
}


def _on_its_device(pairs: Mapping[str, Any]) -> list[Any]:
    on_cpu_only = pytest.mark.cpu_only("an optimizer of the library that steps CPU tensors")
    steps_on_cpu = [name for name in pairs if "CPU" in name or "Lion" in name]
    return [pytest.param(n, marks=[on_cpu_only] * (n in steps_on_cpu)) for n in pairs]


def _stepped(make: Any, group: Group, stage: int) -> tuple[nn.Module, Any]:
    model = parity.build(parity.tiny_float32)
    optimizer = make(model.parameters())
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    parity.run_steps(model, optimizer, range(1), rank=group.rank)
    return model, optimizer


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("pair", _on_its_device(OTHERS))
def test_state_of_another_optimizer_is_refused(
    group: Group, tmp_path: Path, pair: str, stage: int
) -> None:
    """Else it lies in the state, is never used, and what the optimizer had is gone."""
    saves, loads, words = OTHERS[pair]
    zero_engine.save(tmp_path, *_stepped(saves, group, stage), step=1)
    model, optimizer = _stepped(loads, group, stage)
    before = zero_engine.full_optimizer_state_dict(model)
    with pytest.raises(LoadError, match=rf"of \d+ parameters, such as '[\w.]+', .*{words}"):
        zero_engine.load(tmp_path, model, optimizer)
    assert_close(zero_engine.full_optimizer_state_dict(model), before, rtol=0, atol=0)
    report = zero_engine.load(tmp_path, model, optimizer, is_strict=False)
    assert report is not None and re.search(words, str(report))
    assert zero_engine.load(tmp_path, model) is not None


@pytest.mark.parametrize("pair", _on_its_device(ALIKE))
def test_state_with_the_same_entries_is_loaded(group: Group, tmp_path: Path, pair: str) -> None:
    saves, loads = ALIKE[pair]
    model, optimizer = _stepped(saves, group, 3)
    zero_engine.save(tmp_path, model, optimizer, step=1)
    expected = zero_engine.full_optimizer_state_dict(model)
    model, optimizer = _stepped(loads, group, 3)
    zero_engine.load(tmp_path, model, optimizer)
    got = zero_engine.full_optimizer_state_dict(model)
    for number, entries in got.get("state", {}).items():
        assert_close(entries, expected["state"][number], rtol=0, atol=0)


def test_a_report_names_what_was_saved_and_not_asked_for(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    zero_engine.shard(model, optimizer, ZeroConfig(2))
    zero_engine.save(tmp_path, model, optimizer, step=1, scheduler=scheduler)
    report = zero_engine.load(tmp_path, model, optimizer)
    assert report is not None and str(report).endswith("; not loaded: scheduler (pass scheduler=)")
    report = zero_engine.load(tmp_path, model, scheduler=scheduler)
    assert report is not None and report.not_loaded == ("optimizer",)
    report = zero_engine.load(tmp_path, model, optimizer, scheduler=scheduler)
    assert report is not None and not report.not_loaded


WAYS_IN: Final[dict[str, Any]] = {
    "load_full_optimizer_state_dict": lambda model, _, state: (
        zero_engine.load_full_optimizer_state_dict(model, state)
    ),
    "optimizer.load_state_dict": lambda _, optimizer, state: optimizer.load_state_dict(state),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_state_of_another_optimizer_is_refused_whichever_way_it_comes(
    group: Group, way: str
) -> None:
    """The state is that of torch's AdamW over the plain model."""
    plain = parity.build(parity.tiny_float32)
    adamw = torch.optim.AdamW(plain.parameters())
    parity.finish_step(parity.loss_of(plain, parity.batch(0, 0, 0)), adamw)
    model = parity.build(parity.tiny_float32)
    optimizer = SGD(model.parameters(), momentum=0.9)
    zero_engine.shard(model, optimizer, ZeroConfig(3, state_dict="gather"), group=group)
    with pytest.raises(LoadError, match="has exp_avg, exp_avg_sq, step; is it of another"):
        WAYS_IN[way](model, optimizer, adamw.state_dict())


def test_an_entry_that_is_none_is_no_entry(group: Group) -> None:
    """Older versions of torch's SGD kept one where there is no momentum."""
    plain = parity.build(parity.tiny_float32)
    sgd = SGD(plain.parameters())
    for param in plain.parameters():
        sgd.state[param]["momentum_buffer"] = None
    model = parity.build(parity.tiny_float32)
    optimizer = SGD(model.parameters())
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    zero_engine.load_full_optimizer_state_dict(model, sgd.state_dict())
