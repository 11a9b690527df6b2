"""Accelerate's own loop, with `ZeroAccelerator` in place of `Accelerator`: its DDP's numbers."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
import zero_engine
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from zero_comm import Group, Reduction, all_reduce_flat
from zero_comm.testing import assert_close, equal
from zero_engine import ConfigError, FileError
from zero_partition import PartitionError, StateError

pytest.importorskip("accelerate")

STAGES: Final = (1, 2, 3)
ROWS: Final = 22  # of 2 and 2 ranks: the last batch is filled up
ZeroConfig: Final = partial(zero_engine.ZeroConfig, min_unit_bytes=0)


# ---- The script ----


@contextmanager
def _environment(group: Group) -> Iterator[None]:
    """What torchrun says, and none of the states that Accelerate shares in a process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    said = {"WORLD_SIZE": str(group.world_size), "OMP_NUM_THREADS": "1"}
    if (device := group.device).type != "cpu":
        said["ACCELERATE_TORCH_DEVICE"] = str(device)  # of a kind that Accelerate need not know
    if group.world_size > 1:
        said |= {"RANK": str(group.rank), "LOCAL_RANK": str(group.rank)}
        said |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # asked for, and not used
    try:
        with mock.patch.dict(os.environ, said):
            yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def _zero(stage: int = 3, **options: Any) -> Any:
    from zero_engine.integrations.accelerate import ZeroAccelerator

    if torch.get_default_device().type != "cpu":  # where Accelerate starts no group of its own
        options["cpu"] = True
    return ZeroAccelerator(zero=ZeroConfig(stage), **options)


def _ddp(**options: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, **options)


def _model() -> nn.Module:
    torch.manual_seed(0)
    inner = (nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(2))
    return nn.Sequential(*inner, nn.Linear(6, 3))


def _batches() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].sin()), batch_size=2)


def _objects() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, scheduler, _batches()


def _train(accelerator: Any, prepared: Any, *, max_norm: float | None = None) -> list[float]:
    """The loop of Accelerate's documentation."""
    model, optimizer, scheduler, batches = prepared
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients and max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _run(
    group: Group, make: Callable[..., Any], *, steps: int = 1, **clip: Any
) -> tuple[list[float], dict[str, Tensor]]:
    with _environment(group):
        accelerator = make(gradient_accumulation_steps=steps)
        prepared = accelerator.prepare(*_objects())
        losses = _train(accelerator, prepared, **clip)
        return losses, accelerator.get_state_dict(prepared[0])


def _train_plainly(
    group: Group, stage: int, *, steps: int, max_norm: float | None
) -> tuple[list[float], dict[str, Tensor]]:
    """The same by our functions alone: what Accelerate does with batches, losses and schedulers."""
    model, optimizer, scheduler, batches = _objects()
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    rows = list(batches)
    mine = [rows[i % len(rows)] for i in range(group.rank, len(rows) + 1, group.world_size)]
    losses = []
    for number, (x, y) in enumerate(mine, start=1):
        is_last = number % steps == 0 or number == len(mine)
        loss = nn.functional.mse_loss(model(x), y)
        if is_last or stage >= 2:
            (loss / steps).backward()
        else:
            with zero_engine.no_sync(model):
                (loss / steps).backward()
        if is_last:
            if max_norm is not None:
                zero_engine.clip_grad_norm_(model, max_norm)
            optimizer.step()
            for _ in range(group.world_size):
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, zero_engine.full_state_dict(model)


def _assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    assert not ours or ours.keys() == theirs.keys()  # the whole is on rank 0
    for name, value in ours.items():
        assert equal(value, theirs[name]), f"{what}: {name}"


# ---- The law ----


@pytest.mark.ranks(timeout_s=120)
def test_trains_as_accelerates_ddp_and_as_our_plain_loop(group: Group) -> None:
    """One line changed must not change what a script computes."""
    losses, weights = _run(group, _ddp)
    clip = {"steps": 2, "max_norm": 0.1}
    clipped_losses, clipped = _run(group, _ddp, **clip)
    for stage in STAGES:
        ours = _run(group, partial(_zero, stage))
        assert ours[0] == losses, f"stage {stage}"
        _assert_equal(ours[1], weights, f"stage {stage}")

        ours = _run(group, partial(_zero, stage), **clip)
        plain = _train_plainly(group, stage, **clip)
        assert ours[0] == plain[0], f"stage {stage}"
        _assert_equal(ours[1], plain[1], f"stage {stage}, plain loop")
        assert ours[0] == pytest.approx(clipped_losses, rel=1e-5)
        for name, value in ours[1].items():
            assert_close(value, clipped[name], rtol=1e-5, atol=1e-6)


def _around(group: Group, make: Callable[..., Any], folder: Path) -> list[Any]:
    """What scripts do around a loop, twice; returns what they see."""
    seen: list[Any] = []
    with _environment(group):
        accelerator = make(gradient_accumulation_steps=2)
        model, optimizer, scheduler, batches = accelerator.prepare(*_objects())
        for _ in range(2):
            seen += _train(accelerator, (model, optimizer, scheduler, batches), max_norm=0.1)
            for path in (folder / "same", folder / "same", folder / "other"):
                accelerator.save_state(str(path))
            seen += _train(accelerator, (model, optimizer, scheduler, batches))
            for path in (folder / "other", folder / "same", folder / "same"):
                accelerator.load_state(str(path))
            model.eval()
            with torch.no_grad():
                rows = [model(x) for x, _ in batches]
            model.train()
            seen += [accelerator.gather(rows[0]), accelerator.reduce(rows[1], "mean")]
            seen += accelerator.gather_for_metrics(rows)
            seen.append(accelerator.pad_across_processes(rows[0][: group.rank + 1], dim=0))
            # The same objects are prepared once more, as the next phase of a script does.
            inner, plain = accelerator.unwrap_model(model), optimizer.optimizer
            accelerator.free_memory(model, optimizer, scheduler)
            scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
            model, optimizer, scheduler, batches = accelerator.prepare(
                inner, plain, scheduler, _batches()
            )
    return seen


@pytest.mark.ranks(timeout_s=120)
def test_what_is_done_around_a_loop_is_as_with_ddp(group: Group, tmp_path: Path) -> None:
    expected = _around(group, _ddp, tmp_path / "ddp")
    for stage in STAGES:
        found = _around(group, partial(_zero, stage), tmp_path / str(stage))
        assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=f"stage {stage}")


@pytest.mark.ranks(timeout_s=120)
def test_gradients_between_micro_batches_are_what_the_guide_says(group: Group) -> None:
    """A rank's own at stage 0, as in DDP; of others `full_grad` is the mean over ranks."""
    rows = torch.ones(2, 6) * (1 + group.rank)
    with _environment(group):
        accelerator = _ddp(gradient_accumulation_steps=2)
        model = accelerator.prepare(_model())
        with accelerator.no_sync(model):
            accelerator.backward(model(rows).square().sum())
        own = [param.grad.clone() for param in model.parameters()]
    mean = [_mean_over_ranks(grad, group) for grad in own]
    for stage in (0, *STAGES):
        with _environment(group):
            accelerator = _zero(stage, gradient_accumulation_steps=2)
            model, _ = accelerator.prepare(*_objects()[:2])
            with accelerator.no_sync(model):
                accelerator.backward(model(rows).square().sum())
            if stage == 0:
                found = [param.grad for param in model.parameters()]
            else:
                found = [zero_engine.full_grad(param) for param in model.parameters()]
        assert_close(found, mean if stage else own, msg=f"stage {stage}")


def _mean_over_ranks(grad: Tensor, group: Group) -> Tensor:
    flat = all_reduce_flat(grad.clone().flatten(), group=group, op=Reduction.MEAN).wait()
    return flat.view(grad.shape)


@pytest.mark.ranks(timeout_s=120)
def test_objects_are_prepared_in_any_order_and_stay_the_same(group: Group) -> None:
    """Scripts prepare a model with its optimizer or after it, whole or built in parts."""
    expected = _run(group, _ddp)

    def together(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, batches: Any) -> Any:
        scheduler, batches, optimizer, model = accelerator.prepare(
            scheduler, batches, optimizer, model
        )
        return model, optimizer, scheduler, batches

    def optimizer_first(accelerator: Any, model: Any, optimizer: Any, *rest: Any) -> Any:
        optimizer = accelerator.prepare(optimizer)
        model, *others = accelerator.prepare(model, *rest)
        return model, optimizer, *others

    for prepare, builds_sharded in (
        (together, False),
        (optimizer_first, False),
        (together, True),
    ):
        with _environment(group):
            accelerator = _zero()
            with zero_engine.Init() if builds_sharded else nullcontext():
                given = _objects()
            prepared = prepare(accelerator, *given)
            assert prepared[0] is given[0], "the model, without a wrapper"
            assert accelerator.unwrap_model(prepared[0]) is given[0]
            assert prepared[1].optimizer is given[1]
            assert prepared[2].scheduler is given[2]
            assert _train(accelerator, prepared) == expected[0], prepare.__name__
            ours = accelerator.get_state_dict(prepared[0])
            _assert_equal(ours, expected[1], prepare.__name__)

            accelerator.backward(prepared[0](torch.ones(2, 6)).sum())
            with pytest.raises(
                StateError, match=r"zero_engine\.clip_grad_norm_\(model, max_norm\)"
            ):
                accelerator.clip_grad_norm_([next(prepared[0].parameters())], 1.0)
            assert accelerator.prepare(prepared[0]) is prepared[0], "once more"

            gone = [weakref.ref(prepared[0]), weakref.ref(given[1])]
            prepared = accelerator.free_memory(*prepared)
            del given
            gc.collect()
            assert [ref() for ref in gone] == [None, None], "something keeps them"


@pytest.mark.ranks(timeout_s=120)
def test_two_models_train_with_an_optimizer_each(group: Group) -> None:
    """GANs, and students with their teacher, which has none."""

    def train(accelerator: Any) -> list[dict[str, Tensor]]:
        student, other, teacher = _model(), _model(), _model()
        first = torch.optim.SGD(student.parameters(), lr=0.1)
        second = torch.optim.AdamW(other.parameters(), lr=1e-2)
        student, second, other, first, batches = accelerator.prepare(
            student, second, other, first, _batches()
        )
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
        for x, _ in batches:
            with torch.no_grad():
                target = teacher(x)
            accelerator.backward((student(x) - target - 1).square().mean())
            accelerator.backward((other(x) + target).square().mean())
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return [accelerator.get_state_dict(each) for each in (student, other, teacher)]

    with _environment(group):
        expected = train(_ddp())
    with _environment(group):
        for ours, theirs in zip(train(_zero()), expected, strict=True):
            _assert_equal(ours, theirs, "two models")


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x[:, :3]


# torch.compile's own, when it looks at tensors that are no leaves
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.ranks(timeout_s=120)
def test_compiled_models_train_as_accelerates_ddp(group: Group) -> None:
    """Whole at stage 1, and their blocks at stage 3, where a model does not compile as a whole."""
    from accelerate.utils import TorchDynamoPlugin

    def train(accelerator: Any) -> tuple[list[float], dict[str, Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = _Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        prepared = accelerator.prepare(model, optimizer, scheduler, _batches())
        is_compiled = accelerator.state.dynamo_plugin.backend.value != "NO"
        assert hasattr(prepared[0], "_orig_mod") == is_compiled
        return _train(accelerator, prepared), accelerator.get_state_dict(prepared[0])

    with _environment(group):
        expected = train(_ddp(dynamo_backend="no"))
    for stage, by_block in ((1, False), (3, True)):
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=by_block)
        with _environment(group):
            losses, weights = train(_zero(stage, dynamo_plugin=plugin))
        assert losses == expected[0], f"stage {stage}"
        _assert_equal(weights, expected[1], f"stage {stage}")


# ---- Mixed precision ----


@pytest.mark.cpu_only("Accelerate knows the kinds of devices by name")
@pytest.mark.ranks(timeout_s=120)
def test_bf16_is_autocast_and_keeps_bf16_parameters_when_told(group: Group) -> None:
    """As with Accelerate's DDP, and as in Trainer and Lightning; `Precision` says the other."""
    from zero_engine.integrations.accelerate import ZeroAccelerator

    ddp, _ = _run(group, partial(_ddp, mixed_precision="bf16"))
    curves = []
    for stage in STAGES:
        assert _run(group, partial(_zero, stage, mixed_precision="bf16"))[0] == ddp
        with _environment(group):
            precision = zero_engine.Precision(params=torch.bfloat16)
            zero = ZeroConfig(stage, min_unit_bytes=0, precision=precision)
            accelerator = ZeroAccelerator(zero=zero, mixed_precision="bf16")
            prepared = accelerator.prepare(*_objects())
            losses = _train(accelerator, prepared)
            assert losses != ddp and losses == pytest.approx(ddp, rel=0.02), f"stage {stage}"
            curves.append(losses)
            model, optimizer = prepared[:2]
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float32}
            assert model(torch.randn(2, 6)).dtype == torch.float32
    assert curves[0] == curves[1] == curves[2]


@pytest.mark.cpu_only("Accelerate knows the kinds of devices by name")
@pytest.mark.ranks(timeout_s=120)
def test_fp16_on_a_cpu_is_what_it_is_with_accelerate(group: Group) -> None:
    """Without autocast, which Accelerate does not say."""
    expected = _run(group, partial(_ddp, mixed_precision="fp16"))
    with pytest.warns(UserWarning, match="no autocast to fp16 on CPUs"):
        found = _run(group, partial(_zero, mixed_precision="fp16"))
    assert found[0] == expected[0]
    _assert_equal(found[1], expected[1], "fp16")


def _by_turns(group: Group, make: Callable[..., Any], folder: Path) -> list[float]:
    """Two optimizers of one model; saved, trained, loaded and trained."""
    with _environment(group):
        accelerator, model = make(), _model()
        first = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
        second = torch.optim.SGD(model[1:].parameters(), lr=1e-1, momentum=0.9)
        model, *optimizers, batches = accelerator.prepare(model, first, second, _batches())
        losses: list[float] = []

        def train() -> None:
            for step, (x, y) in enumerate(batches):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizers[step % 2].step()
                optimizers[step % 2].zero_grad()
                losses.append(loss.item())

        train()
        model.zero_grad()
        accelerator.save_state(str(folder))
        train()
        model.zero_grad()
        accelerator.load_state(str(folder))
        train()
        return losses


@pytest.mark.ranks(timeout_s=120)
def test_two_optimizers_of_one_model_step_by_turns(group: Group, tmp_path: Path) -> None:
    expected = _by_turns(group, _ddp, tmp_path / "ddp")
    for stage in (0, *STAGES):
        found = _by_turns(group, partial(_zero, stage), tmp_path / str(stage))
        assert found == pytest.approx(expected, rel=1e-6), f"stage {stage}"


@pytest.mark.ranks(timeout_s=120)
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(group: Group) -> None:
    """Accelerate makes the scaler on GPUs only: here it is put in its place."""
    for stage in STAGES:
        with _environment(group):
            accelerator = _zero(stage)
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            model, optimizer, scheduler, batches = accelerator.prepare(*_objects())
            before = accelerator.get_state_dict(model)
            skipped, rates = [], []
            for number, (x, y) in enumerate(batches):
                loss = nn.functional.mse_loss(model(x), y)
                is_bad = number == 0 and group.rank == 1
                accelerator.backward(loss * float("inf") if is_bad else loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                skipped.append(accelerator.optimizer_step_was_skipped)
                rates.append(scheduler.get_last_lr()[0])
                if number == 0:
                    _assert_equal(accelerator.get_state_dict(model), before, f"stage {stage}")
            assert skipped == [True] + [False] * 5, f"stage {stage}"
            assert rates[:2] == [1e-2, pytest.approx(1e-2 / 3)], f"stage {stage}"
            assert accelerator.scaler.get_scale() == 128.0, f"stage {stage}"


# ---- Saving ----


class _Counter:
    """Something that a script registers."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def _begin(stage: int, **options: Any) -> tuple[Any, Any, _Counter]:
    accelerator = _zero(stage, gradient_accumulation_steps=4, **options)
    counter = _Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, accelerator.prepare(*_objects()), counter


def _note(seen: list[Any], models: list[nn.Module], *rest: Any) -> None:
    seen.append((list(models), *rest))


@pytest.mark.ranks(timeout_s=120)
def test_a_saved_state_goes_on_with_the_same_bits(group: Group, tmp_path: Path) -> None:
    """With what Accelerate saves: scheduler, step, registered objects; hooks see the models."""
    from accelerate.utils import ProjectConfiguration

    for stage, resumed in ((1, 1), (2, 3), (3, 2)):
        named = {"automatic_checkpoint_naming": True, "total_limit": 1}
        project = ProjectConfiguration(project_dir=f"{tmp_path}/{stage}", **named)
        with _environment(group):
            accelerator, prepared, counter = _begin(stage, project_config=project)
            seen: list[Any] = []
            accelerator.register_save_state_pre_hook(partial(_note, seen))
            _train(accelerator, prepared)
            accelerator.save_state()
            counter.value = 7
            path = accelerator.save_state()
            assert path == Path(tmp_path, str(stage), "checkpoints/checkpoint_1")
            assert seen[1] == ([prepared[0]], [], str(path))
            assert seen[1][0][0] is prepared[0]
            expected = _train(accelerator, prepared)
            step, rate = accelerator.step, prepared[2].get_last_lr()
        with _environment(group):
            accelerator, prepared, counter = _begin(resumed, project_config=project)
            accelerator.load_state()
            assert counter.value == 7
            assert _train(accelerator, prepared) == expected, f"stage {stage}"
            assert (accelerator.step, prepared[2].get_last_lr()) == (step, rate)


def test_a_saved_state_goes_on_at_another_number_of_ranks(ranks, tmp_path: Path) -> None:
    """Accelerate reads the step on ranks that saved only; all must accumulate alike."""
    saved = _save_alone(Group.solo(), str(tmp_path))
    for loaded, step in ranks(2).run(_load_as_two, timeout_s=120, folder=str(tmp_path)):
        assert step == saved[1] == 3
        _assert_equal(loaded, saved[0], "weights and moments")


def _save_alone(group: Group, folder: str) -> tuple[dict[str, Tensor], int]:
    with _environment(group):
        accelerator, prepared, _ = _begin(3)
        model, _, _, batches = prepared
        for (x, y), _ in zip(batches, range(7), strict=False):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                prepared[1].step()
                prepared[1].zero_grad()
        accelerator.step = 3
        with pytest.warns(UserWarning, match="gradients are not saved"):  # of the seventh batch
            accelerator.save_state(folder)
        return _values(model), accelerator.step


def _load_as_two(group: Group, folder: str) -> tuple[dict[str, Tensor], int]:
    with _environment(group):
        accelerator, prepared, _ = _begin(3)
        with pytest.raises(FileError, match=r"load\(\): .*zero: no such folder"):
            accelerator.load_state(str(Path(folder).parent))
        accelerator.load_state(folder)
        return _values(prepared[0]), accelerator.step


def _values(model: nn.Module) -> dict[str, Tensor]:
    """Weights, and the optimizer's moments by their numbers; empty but on rank 0."""
    found = zero_engine.full_state_dict(model)
    state = zero_engine.full_optimizer_state_dict(model).get("state", {})
    return found | {
        f"{number}.{name}": entry[name] for number, entry in state.items() for name in entry
    }


@pytest.mark.ranks(timeout_s=120)
def test_a_saved_model_is_read_by_accelerate(group: Group, tmp_path: Path) -> None:
    """Whole, in several files, from rank 0."""
    from accelerate import load_checkpoint_in_model

    with _environment(group):
        accelerator = _zero()
        prepared = accelerator.prepare(*_objects())
        _train(accelerator, prepared)
        accelerator.save_model(prepared[0], tmp_path, max_shard_size=500)
        accelerator.wait_for_everyone()
        files = sorted(path.name for path in Path(tmp_path).glob("model*"))
        assert len(files) > 2 and files[-1] == "model.safetensors.index.json", files
        whole = accelerator.get_state_dict(prepared[0])
        assert bool(whole) == (group.rank == 0)
        if whole:
            fresh = _model()
            load_checkpoint_in_model(fresh, tmp_path)
            _assert_equal(whole, fresh.state_dict(), "save_model")


# ---- DeepSpeed's settings ----


@pytest.mark.cpu_only("Accelerate knows the kinds of devices by name")
@pytest.mark.ranks(timeout_s=120)
def test_a_deepspeed_plugin_says_what_deepspeed_would_do(group: Group) -> None:
    """Stage, dtype, accumulation and clipping, from its fields or a file, without the package."""
    from accelerate.utils import DeepSpeedPlugin
    from zero_engine.integrations.accelerate import ZeroAccelerator

    expected = _run(group, partial(_zero, 2), steps=2, max_norm=0.1)
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.1, gradient_accumulation_steps=2)
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=256.0)):  # as on GPUs, with fp16
        with _environment(group):
            accelerator = ZeroAccelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=4)
            accelerator.scaler = scaler  # and the plugin's 2 steps take precedence
            prepared = accelerator.prepare(*_objects())
            assert _train(accelerator, prepared) == expected[0]  # no call clips

    file = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10},
    }
    with _environment(group):
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        accelerator = ZeroAccelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=file))
        assert accelerator.mixed_precision == "bf16"
        model, _ = accelerator.prepare(*_objects()[:2])
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        rests = {name: bool(p.numel()) for name, p in model.named_parameters() if p.numel() <= 10}
        assert all(rests.values()), rests  # biases are whole, as the file says


# ---- Axes of ranks ----


AXES: Final[dict[str, dict[str, int]]] = {
    "shards x tensor": {"dp_shard_size": 2, "tp_size": 2},
    "tensor": {"tp_size": 4},
    "replicas x shards": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "shards": {"dp_shard_size": 4},
}


def _wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 3)})


def _squared_error(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model["down"](model["up"](x).tanh()), y)


@pytest.mark.cpu_only("Accelerate knows the kinds of devices by name")
@pytest.mark.ranks(4, timeout_s=120)
@pytest.mark.parametrize(("axes", "stage"), [("shards x tensor", 1), *((each, 3) for each in AXES)])
def test_axes_of_ranks_are_accelerates(group: Group, stage: int, axes: str, tmp_path: Path) -> None:
    """Ranks along "tp" get the same batches, and the norm is of the whole model."""
    from accelerate.utils import ParallelismConfig

    sizes = AXES[axes]
    num_data = sizes.get("dp_shard_size", 1) * sizes.get("dp_replicate_size", 1)
    alone = _wide()
    its_optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    batches = [*_batches()]
    num_steps = len(batches) // num_data
    for first in range(0, num_steps * num_data, num_data):
        for x, y in batches[first : first + num_data]:
            (_squared_error(alone, x, y) / num_data).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        its_optimizer.step()
        its_optimizer.zero_grad()

    with _environment(group):
        accelerator = _zero(stage, parallelism_config=ParallelismConfig(**sizes))
        model = _wide()
        if "tp_size" in sizes:
            mesh = accelerator.torch_device_mesh["tp"]
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, _batches())
        for _, (x, y) in zip(range(num_steps), loader, strict=False):  # then rows come again
            accelerator.backward(_squared_error(model, x, y))
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        expected = {name: param.detach() for name, param in alone.named_parameters()}
        for name, param in model.named_parameters():
            torch.testing.assert_close(zero_engine.full_param(param), expected[name])
        accelerator.save_state(str(tmp_path))
        zero_engine.set_full_param(model["down"].bias, torch.zeros(3))
        accelerator.load_state(str(tmp_path))
        found = zero_engine.full_param(model["down"].bias)
        torch.testing.assert_close(found, expected["down.bias"])


# ---- What cannot be ----


@pytest.mark.cpu_only("Accelerate knows the kinds of devices by name")
@pytest.mark.ranks(timeout_s=120)
def test_what_cannot_be_beside_it_is_refused_with_the_remedy(group: Group) -> None:
    """Each of these would train something else than it says, or end far from its cause."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import (
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        TorchDynamoPlugin,
        TorchTensorParallelPlugin,
    )
    from zero_engine.integrations.accelerate import ZeroAccelerator

    plugin = DeepSpeedPlugin(gradient_accumulation_steps=4)
    for options, message in (
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, "expected no fsdp_plugin.*leave it"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, "expected no cp_size.*got 2"),
        ({"parallelism_config": ParallelismConfig(sp_size=2)}, "expected no sp_size.*got 2"),
        ({"torch_tp_plugin": TorchTensorParallelPlugin()}, "expected no torch_tp_plugin"),
        (
            {"mixed_precision": "fp16", "deepspeed_plugin": DeepSpeedPlugin()},
            "got 'fp16' on cpu.*say 'bf16'",
        ),
        ({"zero": "ds.json"}, r"from_deepspeed\(file\)"),
        ({"zero": ZeroConfig(), "deepspeed_plugin": plugin}, "leave one out"),
    ):
        with _environment(group), pytest.raises(ConfigError, match=f"(?s){message}"):
            ZeroAccelerator(**options)

    with _environment(group):
        os.environ["ACCELERATE_USE_MEGATRON_LM"] = "true"
        with pytest.raises(ConfigError, match="no ACCELERATE_USE_MEGATRON_LM in the environment"):
            ZeroAccelerator()
    with _environment(group):
        PartialState()  # sees one process, without cpu=True
        with pytest.raises(ConfigError, match="expected the 2 processes of WORLD_SIZE, got 1"):
            ZeroAccelerator()

    with _environment(group):
        accelerator = ZeroAccelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager"))
        with pytest.raises(ConfigError, match=r"whole model at stage 3.*use_regional_compilation"):
            accelerator.prepare(_model())
    with _environment(group):
        accelerator = ZeroAccelerator()
        model = _model()
        model.hf_device_map = {"0": "cpu", "1": "disk"}
        with pytest.raises(ConfigError, match=r"spread over several; load it without device_map"):
            accelerator.prepare(model)
        del model.hf_device_map
        accelerator.prepare(plain := _model())
        with pytest.raises(ConfigError, match=r"sharded already; call prepare\(model, optimizer"):
            accelerator.prepare(torch.optim.SGD(plain.parameters(), lr=0.1))
        zero_engine.shard(model)
        accelerator.prepare(model)  # anew, by this configuration
    with _environment(group):
        wrapped = Accelerator(cpu=True).prepare(_model())
    with _environment(group), pytest.raises((PartitionError, ConfigError), match=r"ddp\.module"):
        ZeroAccelerator().prepare(wrapped)
