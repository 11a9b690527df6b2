"""What DeepSpeed's ZeRO saved goes on here: at any world size, stage, residence and precision."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
import zero_engine.checkpoint
from deepspeed_folders import Form, save_as_deepspeed, save_as_universal
from parity import ZeroConfig
from torch import nn
from training import assert_weights_of
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_engine import FileError, Offload
from zero_partition import LoadError, Precision, StateError

BEFORE, AFTER = 3, 3  # steps
FORMS = {
    "1x2": Form(stage=1, world_size=2),
    "1x3 elastic": Form(stage=1, world_size=3, elastic=True, gap=3),
    "2x2 fp16": Form(stage=2, world_size=2, dtype=torch.float16),
    "2x4 bf16": Form(stage=2, world_size=4, dtype=torch.bfloat16, gap=1),
    "3x2": Form(stage=3, world_size=2),
    "3x3 bf16": Form(stage=3, world_size=3, dtype=torch.bfloat16, subgroups=True),
}


def _build(seed: int = 0) -> nn.Module:
    """What does not train is in 16 bits there, so that its values must be exact in these."""
    model = parity.build(parity.tiny_float32, seed=seed)
    model.frozen.data.copy_(model.frozen.data.bfloat16().half())
    return model


def _trained(steps: int = BEFORE) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """In one process, with plain torch."""
    model = _build()
    optimizer = _adamw(model)
    return model, optimizer, parity.run_steps(model, optimizer, range(steps), rank=0)


def _save(folder: Path, form: str) -> str:
    model, optimizer, _ = _trained()
    save = save_as_universal if form.endswith(" universal") else save_as_deepspeed
    form = form.removesuffix(" universal")
    save(folder, model, optimizer, step=BEFORE, form=FORMS[form])
    return str(folder)


def _saved(group: Group, folder: Path, form: str) -> str:
    """By rank 0. Collective."""
    return parity.by_rank_0(group, partial(_save, folder, form))


def _sharded(
    group: Group, config: zero_engine.ZeroConfig
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Of other values than the saved ones."""
    model = _build(seed=9)
    return zero_engine.shard(model, _adamw(model), config, group=group)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return parity.OPTIMIZERS["adamw"](parity.param_groups(model))


@pytest.mark.parametrize(
    ("form", "stage", "world_size"),
    [
        ("1x2", 3, 1),
        ("1x3 elastic", 2, 3),
        ("2x2 fp16", 2, 2),
        ("2x4 bf16", 3, 2),
        ("3x2", 1, 2),
        ("3x3 bf16", 3, 2),
        ("1x2 universal", 3, 1),
        ("2x4 bf16 universal", 1, 2),
        ("3x2 universal", 2, 2),
        ("3x3 bf16 universal", 3, 3),
    ],
)
def test_training_goes_on_as_if_it_had_been_here_all_along(
    ranks, tmp_path: Path, form: str, stage: int, world_size: int
) -> None:
    """A wrong moment shows only as a curve that is a little worse, weeks later."""
    found = ranks(world_size).run(_go_on, folder=_save(tmp_path, form), stage=stage)

    expected = _trained(BEFORE + AFTER)[2][BEFORE:]
    if world_size < 3:
        assert found[0] == expected
    assert_close(found[0], expected)  # a third of three equal gradients is rounded


def test_state_goes_where_it_rests(group: Group, tmp_path: Path) -> None:
    """The reason to come here may be that the state no longer fits the device."""
    folder = _saved(group, tmp_path / "saved", "3x3 bf16")
    offload = Offload(optimizer="disk", params="disk", path=tmp_path, budget_bytes=2**28)

    found = _go_on(group, folder, 3, offload)

    assert_close(found, _trained(BEFORE + AFTER)[2][BEFORE:])


def _go_on(group: Group, folder: str, stage: int, offload: Offload | None = None) -> list[float]:
    model, optimizer = _sharded(group, ZeroConfig(stage, offload=offload))
    parity.loss_of(model, parity.batch(9, 0, 0)).backward()  # which is dropped
    report = zero_engine.load_deepspeed(folder, model, optimizer)
    assert (report.step, report.missing, report.unexpected) == (BEFORE, (), ())
    steps = range(report.step, report.step + AFTER)
    return parity.run_steps(model, optimizer, steps, rank=0)


def _warmup(step: int) -> float:
    """DeepSpeed's linear one of 20 steps, after `step` of them."""
    return max(0, step - 1) / 20


def _train_there(folder: Path, scheduler: str) -> list[float]:
    """Save in the middle; returns the losses after that."""
    model, optimizer, _ = _trained(0)
    plain = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup)
    losses = []
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            said = {
                "torch's": plain.state_dict(),
                "DeepSpeed's": {"last_batch_iteration": BEFORE - 1},
                "none": None,
            }[scheduler]
            more = {"lr_scheduler": said, "global_samples": 12, "skipped_steps": 1, "epoch": 4}
            more |= {"dp_world_size": 2, "ds_version": "0.19.8", "ds_config": {"zero": {}}}
            form = FORMS["3x2"]
            save_as_deepspeed(folder, model, optimizer, step=BEFORE, form=form, more=more)
        losses += parity.run_steps(model, optimizer, [step], rank=0)
        plain.step()
    return losses[BEFORE:]


def test_a_file_may_ask_for_the_universal_checkpoint(group: Group, tmp_path: Path) -> None:
    """The tag of `latest_universal`, beside others of the run; without one, that is an error."""
    folder = Path(_saved(group, tmp_path, "3x2 universal"))
    model = _build(seed=9)
    file = {"train_batch_size": group.world_size, "zero_optimization": {"stage": 1}}
    engine, *_ = zero_engine.initialize(
        model=model,
        optimizer=_adamw(model),
        config=file | {"checkpoint": {"load_universal": True}},
        group=group,
    )
    parity.by_rank_0(group, partial(_save_elsewhere, folder))

    path, _ = engine.load_checkpoint(folder)

    assert path == f"{folder}/global_step{BEFORE}_universal"
    assert_weights_of(model, _trained()[0], group=group, what="universal")
    parity.by_rank_0(group, (folder / "latest_universal").unlink)
    with pytest.raises(FileError, match=r"ds_to_universal\.py"):
        engine.load_checkpoint(folder)


def _save_elsewhere(folder: Path) -> None:
    (folder / "latest").write_text("elsewhere")
    (folder / "elsewhere").mkdir()


def test_a_universal_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    """By the file that lacks, or that has another shape."""
    folder = Path(_save(tmp_path, "3x2 universal"))
    path, model = folder / f"global_step{BEFORE}_universal", _build(seed=9)
    first = path / "zero" / "blocks.1.up.weight"
    torch.save(torch.ones(3), first / "exp_avg.pt")
    with pytest.raises(FileError, match=r"exp_avg\.pt: expected \d+ elements, .* got 3"):
        zero_engine.load_deepspeed(folder, model)
    (first / "exp_avg.pt").unlink()
    (first / "fp32.pt").unlink()
    with pytest.raises(FileError, match=r"expected zero/blocks\.1\.up\.weight/fp32\.pt"):
        zero_engine.load_deepspeed(folder, model)
    for file in path.glob("*_model_states.pt"):
        file.unlink()
    with pytest.raises(FileError, match="model states of rank 0"):
        zero_engine.load_deepspeed(folder, model)


@pytest.mark.parametrize("name", ["../../elsewhere", "/elsewhere", "..", "a/b", ""])
def test_a_universal_checkpoint_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    """Names are those of folders, and the file that has them may be a stranger's."""
    folder = Path(_save(tmp_path, "1x2 universal"))
    path = next(folder.glob(f"global_step{BEFORE}_universal/*_model_states.pt"))
    content = torch.load(path, weights_only=False)
    content["param_shapes"] = [
        {name: next(iter(group.values()))} for group in content["param_shapes"]
    ]
    torch.save(content, path)

    with pytest.raises(FileError, match=f"expected the name of a parameter, got {name!r}"):
        zero_engine.load_deepspeed(folder, _build(seed=9))


@pytest.mark.parametrize("scheduler", ["torch's", "DeepSpeed's", "none"])
def test_an_engine_resumes_from_what_deepspeeds_saved(
    group: Group, tmp_path: Path, scheduler: str
) -> None:
    """A script's `load_checkpoint` finds the old run's folder: it began anew, with a warning."""
    expected = parity.by_rank_0(group, partial(_train_there, tmp_path, scheduler))
    model = _build(seed=9)
    optimizer, given = _adamw(model), None
    settings: dict[str, Any] = {"train_batch_size": 4, "gradient_clipping": 0.0}
    if scheduler == "DeepSpeed's":
        params = {"warmup_num_steps": 20, "warmup_type": "linear"}
        settings["scheduler"] = {"type": "WarmupLR", "params": params}
    else:
        given = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup)
    config = settings | {"zero_optimization": {"stage": 2}}
    engine, *_ = zero_engine.initialize(
        model=model, optimizer=optimizer, lr_scheduler=given, config=config, group=group
    )
    anew = pytest.warns(UserWarning, match="begins anew: the scheduler")
    with anew if scheduler == "none" else nullcontext():
        path, client_state = engine.load_checkpoint(str(tmp_path))
    assert path == f"{tmp_path}/global_step{BEFORE}" and client_state == {"epoch": 4}
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (BEFORE, 1, 12)
    with pytest.raises(FileError, match="expected a folder 'x' in it"):
        engine.load_checkpoint(tmp_path, tag="x")
    found = []
    for step in range(BEFORE, BEFORE + AFTER):
        loss = parity.loss_of(engine, parity.batch(step, 0, 0))
        found.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert found == expected or scheduler == "none"


def test_masters_are_the_saved_ones_to_the_last_bit(group: Group, tmp_path: Path) -> None:
    """Parameters in bf16 are rounded; masters made of those would forget what was learnt."""
    config = ZeroConfig(3, precision=Precision(params=torch.bfloat16))
    model, optimizer = _sharded(group, config)
    zero_engine.load_deepspeed(_saved(group, tmp_path, "2x4 bf16"), model, optimizer)

    expected = dict(_trained()[0].named_parameters())
    for name, param in model.named_parameters():
        assert equal(zero_engine.full_param(param).float(), expected[name]), name
    with zero_engine.unsharded(model):
        for name, param in model.named_parameters():
            assert equal(param, expected[name].bfloat16()), name


def test_weights_alone_go_into_a_model_that_is_not_there_yet(group: Group, tmp_path: Path) -> None:
    """Inference, or fine-tuning with another optimizer: no rank holds the whole model."""
    with zero_engine.Init(group=group):
        model = parity.tiny_float32()
    zero_engine.load_deepspeed(_saved(group, tmp_path, "3x3 bf16"), model, group=group)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)

    assert_weights_of(model, _trained()[0], group=group, what="loaded")


def test_what_was_saved_there_is_exported_from_here(tmp_path: Path) -> None:
    """Without unpickling anything, on one process."""
    for name in FORMS:
        out = tmp_path / name

        zero_engine.export(_save(tmp_path / f"{name} saved", name), out)

        readers = zero_engine.checkpoint.open_weights(out)
        found = {name: reader.whole() for name, reader in readers.items()}
        expected = _trained()[0].state_dict()
        del expected["head.weight"]
        assert found.keys() == expected.keys()
        frozen = found.pop("frozen")
        assert equal(frozen.float(), expected.pop("frozen"))
        assert all(equal(found[key], value) for key, value in expected.items()), name


# ---- What is wrong ----


FIRST, SECOND = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
SPOILT: Final[list[tuple[Callable[[Path], Any], str]]] = [  # what is done to a folder, and said
    (lambda path: (path / SECOND).unlink(), "optimizer states of 2 ranks, got files of 1"),
    (
        lambda path: shutil.copy(path / FIRST, path / FIRST.replace("mp_rank_00", "mp_rank_01")),
        "mp_rank_01_optim_states.pt, as of tensor",
    ),
    (
        lambda path: shutil.copy(path / FIRST, path / f"bf16_{FIRST}"),
        "expected one such file of rank 0",
    ),
    (lambda path: os.truncate(path / FIRST, 2000), f"{FIRST}: expected a whole file"),
    (
        lambda path: (path.parent / "latest").write_text("../0"),  # which there is
        r"expected a folder '\.\./0' in it",
    ),
    (
        lambda path: (path / "mp_rank_00_model_states.pt").unlink(),
        "file of model states of rank 0",
    ),
]


def test_a_folder_that_is_not_whole_is_refused(group: Group, tmp_path: Path) -> None:
    """On every rank, in words, with the model as it was."""
    model, optimizer = _sharded(group, ZeroConfig(3))
    for index, (spoil, message) in enumerate(SPOILT):
        folder = _saved(group, tmp_path / str(index), "1x2")
        parity.by_rank_0(group, partial(spoil, Path(folder) / f"global_step{BEFORE}"))
        with pytest.raises(FileError, match=message):
            zero_engine.load_deepspeed(folder, model, optimizer)

    assert_weights_of(model, _build(seed=9), group=group, what="untouched")


class _Evil:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path(self.marker),)


def test_what_a_file_would_run_is_named_and_not_run(tmp_path: Path) -> None:
    """Checkpoints are downloaded from strangers."""
    _save(tmp_path, "1x2")
    said = {"optimizer_state_dict": {"a": _Evil(str(tmp_path / "marker"))}}
    for file in (SECOND, "mp_rank_00_model_states.pt"):
        path = tmp_path / f"global_step{BEFORE}" / file
        was = path.read_bytes()
        torch.save(said, path)
        with pytest.raises(FileError, match=rf"{file}: .* nothing of it was run: it asks for"):
            zero_engine.load_deepspeed(tmp_path, _build())
        path.write_bytes(was)

    assert not (tmp_path / "marker").exists()
    with pytest.raises(StateError, match="expected a model that was sharded"):
        zero_engine.load_deepspeed(tmp_path, *_trained()[:2])


def _save_partly_frozen(folder: Path) -> None:
    model, _, _ = _trained()
    for param in model.blocks[1].parameters():
        param.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    save_as_deepspeed(folder, model, optimizer, step=BEFORE, form=FORMS["3x2"])


def test_what_does_not_fit_is_named_and_nothing_is_written(group: Group, tmp_path: Path) -> None:
    """Half a checkpoint in a model is worse than none."""
    parity.by_rank_0(group, partial(_save_partly_frozen, tmp_path))
    model, optimizer = _sharded(group, ZeroConfig(3))
    with pytest.raises(LoadError, match=r"no optimizer state of 'blocks\.1\.up\.weight'"):
        zero_engine.load_deepspeed(tmp_path, model, optimizer)
    assert_weights_of(model, _build(seed=9), group=group, what="untouched")

    zero_engine.load_deepspeed(tmp_path, model, optimizer, is_strict=False)
    parity.run_steps(model, optimizer, range(1), rank=group.rank)
