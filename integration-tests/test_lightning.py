"""Lightning: what DDPStrategy trains, ZeroStrategy trains, and so do the two of Fabric."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zero_engine
from torch import nn
from torch.distributed.tensor import Replicate
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_engine import ConfigError

pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{said}")
    for said in (
        r".isinstance\(treespec, LeafSpec\). is deprecated:FutureWarning",
        "Using `DistributedSampler` with the dataloaders",
        "You.re resuming from a checkpoint that ended before the epoch ended",
        "Be aware that when using `ckpt_path`, callbacks used",
        "Checkpoint directory .* exists and is not empty",
        r"The '\w+' does not have many workers",
    )
]


@pytest.mark.ranks(timeout_s=120)
def test_fit_validate_and_predict_are_those_of_ddp_strategy(group: Group) -> None:
    """The sanity check is a forward before any backward; what follows `fit` finds it sharded."""
    import lightning_loops as loops
    from lightning.pytorch.utilities.model_summary import summarize

    expected: Any = None
    for stage in (None, 1, 2, 3):
        module = loops.Module()
        got = loops.fit(group, stage, module, num_sanity_val_steps=2)
        trainer = got[2]
        rest = [summarize(module).total_parameters, trainer.callback_metrics["loss"]]
        rest += trainer.validate(module, loops.batches(), verbose=False)
        rest += torch.cat(trainer.predict(module, loops.batches())).tolist()
        if stage is None:
            expected = got, rest
            continue
        loops.assert_same(got, expected[0], group=group, what=f"stage {stage}")
        assert rest == expected[1], f"stage {stage}"


@pytest.mark.ranks(timeout_s=120)
def test_manual_optimization_and_closures_that_are_repeated_are_those_of_ddp_strategy(
    group: Group,
) -> None:
    """Chained optimizers step inside training_step(), past the module's forward."""
    import lightning_loops as loops

    for make in (lambda: loops.Manual(loops.chained), lambda: loops.Module(loops.looks_ahead)):
        expected = loops.fit(group, None, make())
        for stage in (1, 2, 3):
            got = loops.fit(group, stage, make())
            loops.assert_same(got, expected, group=group, what=f"stage {stage}")


@pytest.mark.drawn(3)
@pytest.mark.ranks(timeout_s=180)
@pytest.mark.parametrize("kind", ["another each time", "the one it keeps", "by the same trainer"])
def test_a_second_fit_is_that_of_ddp_strategy(group: Group, kind: str) -> None:
    """A module is trained in phases, a notebook's cell is run again."""
    import lightning_loops as loops

    def kept(module: nn.Module, known: dict[int, Any]) -> torch.optim.Optimizer:
        return known.setdefault(0, loops.adamw(module))

    def run(stages: tuple[Any, ...]) -> Any:
        known: dict[int, Any] = {}
        keeps = kind == "the one it keeps"
        module = loops.Module((lambda module: kept(module, known)) if keeps else loops.adamw)
        got: Any = loops.fit(group, stages[0], module)
        for stage in stages[1:]:
            if kind == "by the same trainer":
                got[2].fit_loop.max_epochs += 2
                got[2].fit(module, loops.batches(), loops.batches(8))
                weights = module.state_dict()
                if stage is not None:
                    weights = zero_engine.full_state_dict(module)
                got = list(module.losses), {k: v.clone() for k, v in weights.items()}, got[2]
            else:
                got[2].validate(module, loops.batches(), verbose=False)
                got = loops.fit(group, stage, module)
        return got

    expected = run((None, None, None))
    for stages in ((0, 0, 0), (1, 1, 1), (2, 3, 1), (3, 3, 3), (3, 2, 3)):
        if kind == "by the same trainer" and len(set(stages)) > 1:
            continue
        loops.assert_same(run(stages), expected, group=group, what=f"{kind}, stages {stages}")


@pytest.mark.ranks(timeout_s=120)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_is_one_file_on_request(group: Group, tmp_path: Path, stage: int) -> None:
    """What Lightning's own calls read, also DDPStrategy, and a sharded run goes on from it."""
    import lightning_loops as loops

    got = loops.fit(group, stage, loops.Module(), fields={"single_file": True}, max_epochs=1)
    file = tmp_path / "all.ckpt"
    got[2].save_checkpoint(file)
    plain = loops.Module.load_from_checkpoint(file)
    if group.rank == 0:
        parity.assert_same_weights(plain.state_dict(), got[1], what="one file")
    results = [
        loops.fit(group, each, loops.Module(), ckpt_path=file) for each in (None, stage, 4 - stage)
    ]
    for result in results[1:]:
        loops.assert_same(result, results[0], group=group, what="resumed")


@pytest.mark.ranks(timeout_s=120)
def test_two_optimizers_step_by_turns(group: Group, tmp_path: Path) -> None:
    """In manual optimization, as a GAN's: it was refused, with a chain as the remedy."""
    import lightning_loops as loops

    class ByTurns(loops.Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            blocks = torch.optim.AdamW(self.net["blocks"].parameters(), lr=0.01)
            rest = [*self.net["head"].parameters(), self.shift]
            return blocks, torch.optim.SGD(rest, lr=0.1, momentum=0.9)

        def training_step(self, batch: Any, index: int) -> None:
            for number, optimizer in enumerate(self.optimizers()):
                loss = self.loss_of(batch) * (number + 1)
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(
                    optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value"
                )
                optimizer.step()
                self.losses.append(loss.item())

    expected = loops.fit(group, None, ByTurns())
    for stage in (0, 1, 2, 3):
        got = loops.fit(group, stage, ByTurns(), enable_checkpointing=False)
        loops.assert_same(got, expected, group=group, what=f"stage {stage}")
        got[2].save_checkpoint(tmp_path / f"{stage}.ckpt")
        again = loops.fit(
            group, stage, ByTurns(), ckpt_path=tmp_path / f"{stage}.ckpt", max_epochs=3
        )
        assert len(again[0]) == len(got[0]) // 2


@pytest.mark.drawn(2)
@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.ranks(timeout_s=120)
def test_a_backbone_is_thawed_epoch_by_epoch(group: Group, tmp_path: Path) -> None:
    """Lightning freezes it before training, and adds its parameters to the optimizer later.

    Against a loop in one process: DDP never averages gradients of what was frozen when it began.
    """
    import lightning_loops as loops
    from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
    from torch.utils.data import DataLoader, TensorDataset

    class WithBackbone(loops.Module):
        def build(self) -> None:
            super().build()
            self.backbone = self.net["blocks"]

    class ByBlocks(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net["blocks"])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            block = pl_module.net["blocks"][2 - epoch]
            self.unfreeze_and_add_param_group(block, optimizer, lr=1e-3)

    def trained(module: nn.Module) -> torch.optim.Optimizer:
        params = [param for param in module.parameters() if param.requires_grad]
        return torch.optim.AdamW(params, lr=0.01)

    generator = torch.Generator().manual_seed(4)
    data = [torch.randn(6, size, generator=generator) for size in (loops.WIDTH, 3)]
    plain = WithBackbone()
    plain.net["blocks"].requires_grad_(False)
    optimizer, losses = trained(plain), []
    for epoch in range(3):
        block = plain.net["blocks"][2 - epoch].requires_grad_(True)
        optimizer.add_param_group({"params": list(block.parameters()), "lr": 1e-3})
        for batch in zip(*(part.split(2) for part in data), strict=True):
            losses.append(plain.loss_of(batch).item())
            plain.loss_of(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        for of_group in optimizer.param_groups:
            of_group["lr"] *= 0.9  # as the module's scheduler does

    options: Any = {"max_epochs": 3, "use_distributed_sampler": False}  # all ranks have all of it
    for stage in (0, 1, 2, 3):
        module = WithBackbone(trained)
        strategy = loops.strategy_of(stage)
        trainer = loops.trainer_of(group, strategy, callbacks=[ByBlocks()], **options)
        trainer.fit(module, DataLoader(TensorDataset(*data), batch_size=2))
        assert_close(module.losses, losses)
        for name, value in zero_engine.full_state_dict(module).items():
            assert_close(value, plain.state_dict()[name])

        first, second = WithBackbone(trained), WithBackbone(trained)
        short = {**options, "max_epochs": 2, "callbacks": [ByBlocks()]}
        trainer = loops.trainer_of(group, loops.strategy_of(stage), **short)
        trainer.fit(first, DataLoader(TensorDataset(*data), batch_size=2))
        trainer.save_checkpoint(tmp_path / f"{stage}.ckpt")
        trainer = loops.trainer_of(
            group, loops.strategy_of(4 - stage if stage else 0), callbacks=[ByBlocks()], **options
        )
        loader = DataLoader(TensorDataset(*data), batch_size=2)
        trainer.fit(second, loader, ckpt_path=tmp_path / f"{stage}.ckpt")
        assert_close([*first.losses, *second.losses], losses)

        thawing = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        loops.fit(group, stage, WithBackbone(trained), callbacks=[thawing], max_epochs=3)


@pytest.mark.filterwarnings("ignore")  # Lightning's, of a search for so few steps
@pytest.mark.ranks(timeout_s=120)
def test_a_learning_rate_is_found_and_nothing_is_left(group: Group, tmp_path: Path) -> None:
    """Tuner saves a checkpoint of a hidden name, and trains from it afterwards."""
    import lightning_loops as loops
    from lightning.pytorch.tuner import Tuner

    found = []
    for stage in (None, 1, 3):
        module = loops.Module(lambda module: torch.optim.SGD(module.parameters(), lr=module.lr))
        module.lr = 1e-3
        options = {"max_epochs": 1, "default_root_dir": tmp_path}
        trainer = loops.trainer_of(group, loops.strategy_of(stage), **options)
        data = loops.batches()
        search = Tuner(trainer).lr_find(module, data, num_training=5, update_attr=False)
        assert search is not None
        trainer.fit(module, data)
        found.append((search.results["loss"], list(module.losses)))
    assert found[1] == found[0]
    assert found[2] == found[0]
    dist.barrier()
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.:UserWarning")
@pytest.mark.ranks(timeout_s=120)
def test_a_module_without_an_optimizer_is_fitted(group: Group, tmp_path: Path) -> None:
    """`configure_optimizers()` may return None; and a file is written before any fit."""
    import lightning_loops as loops

    weights = []
    for stage in (None, 3):
        module = loops.Module(lambda _: None)
        trainer = loops.trainer_of(group, loops.strategy_of(stage))
        trainer.strategy.connect(module)
        trainer.save_checkpoint(tmp_path / f"{stage}.ckpt")
        saved = torch.load(tmp_path / f"{stage}.ckpt", weights_only=False)["state_dict"]
        got = loops.fit(group, stage, module)
        weights.append((got[0], got[1], saved))
        for fields in ({}, {"single_file": True}) if stage else ({},):
            trainer = loops.trainer_of(group, loops.strategy_of(stage, **fields))
            trainer.fit(module, loops.batches(), loops.batches(8))
            path = tmp_path / f"{stage}-{len(fields)}.ckpt"
            trainer.save_checkpoint(path)
            loops.fit(group, stage, module, ckpt_path=path, max_epochs=3, fields=fields)
    loops.assert_same(weights[1], weights[0], group=group, what="without")
    loops.assert_same(([], weights[1][2]), ([], weights[0][2]), group=group, what="saved")


@pytest.mark.ranks(timeout_s=120)
def test_what_configure_model_builds_is_sharded_while_it_is_built(group: Group) -> None:
    """And has the values of plain construction on rank 0."""
    import lightning_loops as loops

    for precision in ("32-true", "bf16-true"):
        expected = loops.fit(group, None, loops.BuiltLater(), precision=precision)
        module = loops.BuiltLater()
        got = loops.fit(group, 3, module, precision=precision)
        assert not module.is_whole
        loops.assert_same(got, expected, group=group, what=precision)


@pytest.mark.ranks(timeout_s=120)
def test_clipping_and_accumulation_are_close_to_ddp_strategy_and_equal_to_a_plain_loop(
    group: Group,
) -> None:
    """The norm is that over all ranks; sharded gradients are reduced by every backward."""
    import lightning_loops as loops

    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    losses, weights, _ = loops.fit(group, None, loops.Module(loops.sgd), **options)
    on_host = {"offload": zero_engine.Offload(optimizer="host")}
    for stage, fields in ((1, {}), (3, {}), (3, on_host)):
        module = loops.Module(loops.sgd)
        got = loops.fit(group, stage, module, fields=fields, **options)
        assert_close(got[0], losses, rtol=1e-5, atol=0)
        if group.rank == 0:
            assert_close(got[1], weights, rtol=1e-5, atol=1e-6)
        config = zero_engine.ZeroConfig(stage, min_unit_bytes=0, **fields)
        plain = _plain_loop(group, module.seen, config)
        loops.assert_same(got, plain, group=group, what=f"stage {stage}")


def _plain_loop(
    group: Group, seen: list[Any], config: zero_engine.ZeroConfig
) -> tuple[list[float], dict[str, Any]]:
    """The same steps by hand, of the batches that Lightning gave to this rank."""
    import lightning_loops as loops

    module = loops.Module()
    optimizer = loops.sgd(module)
    zero_engine.shard(module, optimizer, config, group=group)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(4):
        first, second = seen[2 * step : 2 * step + 2]
        with zero_engine.no_sync(module) if config.stage < 2 else nullcontext():
            (module.training_step(first, 0) / 2).backward()
        (module.training_step(second, 0) / 2).backward()
        zero_engine.clip_grad_norm_(module, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            scheduler.step()  # an epoch has ended
    return module.losses, zero_engine.full_state_dict(module)


@pytest.mark.cpu_only("Lightning knows the autocast of CPUs and of CUDA")
@pytest.mark.ranks(timeout_s=120)
def test_mixed_precision_is_that_of_ddp_strategy(group: Group) -> None:
    """Lightning has bf16 in the place of fp16 on the CPU, and says so; its scaler works there."""
    import lightning_loops as loops
    from lightning.pytorch.plugins import MixedPrecision

    def scaled() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=3)
        return {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}

    def replaced() -> dict[str, Any]:
        return {"precision": "16-mixed"}

    def exact() -> dict[str, Any]:
        return {"precision": "64-true"}

    for options in (lambda: {"precision": "bf16-mixed"}, replaced, scaled, exact):
        runs = []
        for stage in (None, 2, 3):
            expects = pytest.warns(match="Using `precision='bf16-mixed'` instead")
            with expects if options is replaced and not group.rank else nullcontext():
                runs.append(loops.fit(group, stage, loops.Module(), **options()))
        for got in runs[1:]:
            loops.assert_same(got, runs[0], group=group, what=str(options()))


@pytest.mark.ranks(timeout_s=120)
def test_lightnings_own_average_of_weights_is_that_of_ddp_strategy_at_stage_2(group: Group) -> None:
    """It reads and writes parameters, which rest whole there; at stage 3 it is refused."""
    import lightning_loops as loops
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    def run(stage: int | None) -> Any:
        callback = StochasticWeightAveraging(0.01, swa_epoch_start=1)
        return loops.fit(group, stage, loops.Module(), callbacks=callback, max_epochs=3)

    loops.assert_same(run(2), run(None), group=group, what="stage 2")


def test_checkpoints_resume_at_another_number_of_ranks_and_from_ddp_strategy(
    ranks, tmp_path
) -> None:
    """ModelCheckpoint's best and last are folders; what goes on from them is what DDP's does."""
    ranks(2).run(_save, timeout_s=120, folder=str(tmp_path))
    kept = sorted(path.name for path in tmp_path.iterdir())  # and neither of step 2
    assert kept == ["ddp-step=4.ckpt", "last.ckpt", "weights.ckpt", "zero-step=4.ckpt"]
    ranks(1).run(_resume_alone, timeout_s=120, folder=str(tmp_path))


def _save(group: Group, folder: str) -> None:
    import lightning_loops as loops
    from lightning.pytorch.callbacks import ModelCheckpoint

    whole = loops.fit(group, None, loops.Module())
    for stage, name in ((None, "ddp"), (3, "zero")):
        keeps = ModelCheckpoint(
            folder, f"{name}-{{step}}", every_n_train_steps=2, save_last=stage == 3
        )
        options = {"enable_checkpointing": True, "callbacks": keeps}
        trainer = loops.fit(group, stage, loops.Module(), max_epochs=1, **options)[2]
    best, last = keeps.best_model_path, keeps.last_model_path
    said = trainer.callback_metrics["loss"].item()
    for path in (best, last, f"{folder}/weights.ckpt"):
        if path not in (best, last):
            trainer.save_checkpoint(path, weights_only=True)
        fresh = loops.Module()
        with torch.no_grad():
            fresh.shift.zero_()
        checker = loops.trainer_of(group, loops.strategy_of(2))
        (found,) = checker.validate(fresh, loops.batches(8), ckpt_path=path, verbose=False)
        assert found["loss"] == said
    module = loops.Module.load_from_checkpoint(f"{folder}/weights.ckpt")
    assert_close(module.shift, trainer.lightning_module.shift + 0, rtol=0, atol=0)
    for stage, path in ((3, last), (2, best), (1, f"{folder}/ddp-step=4.ckpt")):
        module = loops.Module()
        module.losses += whole[0][:4]
        got = loops.fit(group, stage, module, ckpt_path=path)
        loops.assert_same(got, whole, group=group, what=f"stage {stage} from {path}")


def _resume_alone(group: Group, folder: str) -> None:
    import lightning_loops as loops

    expected = loops.fit(group, None, loops.Module(), ckpt_path=f"{folder}/ddp-step=4.ckpt")
    for stage, path in ((1, "last.ckpt"), (3, "zero-step=4.ckpt"), (2, "ddp-step=4.ckpt")):
        got = loops.fit(group, stage, loops.Module(), ckpt_path=f"{folder}/{path}")
        loops.assert_same(got, expected, group=group, what=f"stage {stage} from {path}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.ranks(1, timeout_s=120)
def test_fp16_on_a_gpu_is_that_of_ddp_strategy(group: Group) -> None:
    """There Lightning keeps the scaler, and moves models and optimizers between phases."""
    import lightning_loops as loops

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    options = {"accelerator": "cuda", "precision": "16-mixed"}
    expected = loops.fit(group, None, loops.Module(), **options)
    for stage in (1, 2, 3):
        module = loops.Module()
        got = loops.fit(group, stage, module, **options)
        loops.assert_same(got, expected, group=group, what=f"stage {stage}")
        assert module.shift.is_cuda


@pytest.mark.cpu_only("Fabric's own DDP asks for a stream of CUDA")
@pytest.mark.ranks(timeout_s=120)
def test_fabric_trains_saves_and_loads_as_under_its_ddp_strategy(
    group: Group, tmp_path: Path
) -> None:
    """Accumulation, both clippings, sharded construction, and a closure of the scaler."""
    import lightning_loops as loops
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy
    from zero_engine.integrations.lightning import ZeroFabricStrategy

    def start(strategy: Any, **options: Any) -> tuple[Any, Any, Any]:
        loops.join(group)
        fabric = Fabric(accelerator="cpu", strategy=strategy, devices=group.world_size, **options)
        fabric.launch()
        with fabric.init_module():
            model = loops.Module()
        model, optimizer = fabric.setup(model, loops.sgd(model))
        return fabric, model, optimizer

    def train(fabric: Any, model: Any, optimizer: Any, *, clips: dict[str, float]) -> list[float]:
        losses = []
        for index, batch in enumerate(fabric.setup_dataloaders(loops.batches())):
            is_first = index % 2 == 0
            with fabric.no_backward_sync(model, enabled=is_first):
                loss = nn.functional.mse_loss(model(batch[0]), batch[1])
                fabric.backward(loss)
            losses.append(loss.item())
            if is_first and index:
                optimizer.zero_grad()  # what was accumulated is thrown away
            elif not is_first:
                fabric.clip_gradients(model, optimizer, **clips)
                optimizer.step()
                optimizer.zero_grad()
        return losses

    for clips in ({"clip_val": 0.05}, {"max_norm": 0.1}):
        fabric, plain, optimizer = start(DDPStrategy())
        expected = train(fabric, plain, optimizer, clips=clips)
        for stage in (1, 2, 3):
            fabric, model, optimizer = start(ZeroFabricStrategy(stage, min_unit_bytes=0))
            losses = train(fabric, model, optimizer, clips=clips)
            if "clip_val" in clips:
                got = losses, zero_engine.full_state_dict(model.module)
                theirs = expected, plain.state_dict()
                loops.assert_same(got, theirs, group=group, what=f"stage {stage}")
            assert_close(losses, expected, rtol=1e-5, atol=0)

    state = {"model": model, "optimizer": optimizer, "step": 4, "seed": (1, 2)}
    fabric.save(f"{tmp_path}/it.ckpt", state)
    after = train(fabric, model, optimizer, clips=clips)
    other, model, optimizer = start(ZeroFabricStrategy(1))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert other.load(f"{tmp_path}/it.ckpt", state) == {"seed": (1, 2)}
    assert state["step"] == 4
    assert train(other, model, optimizer, clips=clips) == after


@pytest.mark.cpu_only("Fabric's own DDP asks for a stream of CUDA")
@pytest.mark.ranks(timeout_s=120)
def test_fabric_saves_several_optimizers(group: Group, tmp_path: Path) -> None:
    import lightning_loops as loops
    from lightning.fabric import Fabric
    from zero_engine.integrations.lightning import ZeroFabricStrategy

    def start(stage: int) -> tuple[Any, ...]:
        loops.join(group)
        fabric = Fabric(
            accelerator="cpu",
            strategy=ZeroFabricStrategy(stage, min_unit_bytes=0),
            devices=group.world_size,
        )
        fabric.launch()
        module = loops.Module()
        assert module.net is not None
        blocks = torch.optim.AdamW(module.net["blocks"].parameters(), lr=0.01)
        rest = torch.optim.SGD([*module.net["head"].parameters(), module.shift], 0.1, momentum=0.9)
        return fabric, *fabric.setup(module, blocks, rest)

    def train(fabric: Any, model: Any, *optimizers: Any) -> list[float]:
        losses = []
        for x, y in loops.batches():
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for stage in (0, 1, 3):
        fabric, model, *optimizers = start(stage)
        train(fabric, model, *optimizers)
        names = ("model", "blocks", "rest")
        state = dict(zip(names, (model, *optimizers), strict=True))
        fabric.save(f"{tmp_path}/{stage}.ckpt", state | {"step": 3})
        expected = train(fabric, model, *optimizers)
        fabric, model, *optimizers = start(3 - stage)
        state = dict(zip(names, (model, *optimizers), strict=True)) | {"step": 0}
        assert fabric.load(f"{tmp_path}/{stage}.ckpt", state) == {}
        assert state["step"] == 3
        assert_close(train(fabric, model, *optimizers), expected)


@pytest.mark.cpu_only("Fabric's own DDP asks for a stream of CUDA")
@pytest.mark.ranks(timeout_s=120)
def test_two_models_of_fabric_train_by_turns(group: Group) -> None:
    """What a Trainer's one module cannot: each has an optimizer, and steps alone."""
    import lightning_loops as loops
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy
    from zero_engine.integrations.lightning import ZeroFabricStrategy

    curves = []
    for strategy in (DDPStrategy(), ZeroFabricStrategy(2), ZeroFabricStrategy(3)):
        loops.join(group)
        fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2)
        fabric.launch()
        pairs = []
        for seed in (0, 1):
            parity.seed_all(seed)
            model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
            pairs.append(fabric.setup(model, loops.sgd(model)))
        losses = []
        for step in range(6):
            parity.seed_all(10 * step + group.rank)
            (trained, optimizer), (other, its_optimizer) = pairs[:: 1 if step % 2 else -1]
            loss = other(trained(torch.randn(4, 6))).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            its_optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[1:] == [curves[0]] * 2


@pytest.mark.ranks(timeout_s=120)
def test_what_cannot_be_says_what_to_do(group: Group, tmp_path: Path) -> None:
    """Not Lightning's own message about some attribute, and no wrong numbers."""
    import lightning_loops as loops
    from lightning.fabric import Fabric
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from lightning.pytorch.plugins import FSDPPrecision
    from zero_engine.integrations.lightning import ZeroFabricStrategy, ZeroStrategy

    def two(module: nn.Module) -> list[torch.optim.Optimizer]:
        return [loops.sgd(module), loops.sgd(module)]

    class Filtering(loops.Module):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {"shift": torch.zeros(6)}

    def fit(module: Any = None, **options: Any) -> Any:
        return loops.fit(group, 3, loops.Module() if module is None else module, **options)[2]

    def fabric() -> Any:
        loops.join(group)
        made = Fabric(accelerator="cpu", strategy=ZeroFabricStrategy(), devices=2)
        made.launch()
        return made

    bf16 = zero_engine.Precision(params=torch.bfloat16)
    trained, net = fit(), nn.Linear(2, 2)
    zero_engine.save(tmp_path, trained.lightning_module, trained.optimizers[0], step=0, tag="plain")
    wrapped = loops.Module()
    wrapped.net = nn.parallel.DistributedDataParallel(wrapped.net)
    refused = {
        "got the plugin FSDPPrecision": lambda: fit(plugins=FSDPPrecision("32-true")),
        "expected one precision": lambda: fit(precision="bf16-true", fields={"precision": bf16}),
        "torch.compile": lambda: fit(torch.compile(loops.Module(), backend="eager")),
        "zero_engine.ShardedAverage": lambda: fit(callbacks=StochasticWeightAveraging(0.1)),
        "is in two of the optimizers": lambda: fit(loops.Manual(two)),
        "ddp.module": lambda: fit(wrapped),
        r"checkpoint\['state_dict'\]": lambda: fit(Filtering()).save_checkpoint("x"),
        "expected no storage_options": lambda: trained.save_checkpoint(
            "x", storage_options={"a": 1}
        ),
        "a path that every rank sees": lambda: trained.save_checkpoint("s3://bucket/x"),
        "one of a plain loop": lambda: fit(ckpt_path=f"{tmp_path}/plain"),
        "from_deepspeed": lambda: ZeroStrategy(config={"zero_optimization": {"stage": 3}}),
        "stage: expected": lambda: ZeroStrategy(4),
        "fabric.setup\\(model, optimizer\\)": lambda: fabric().setup_optimizers(loops.sgd(net)),
        "'weight' is in two of the": lambda: fabric().setup(net, *two(net)),
        "give the model in `state`": lambda: fabric().load(f"{tmp_path}/plain", {}),
    }
    for said, action in refused.items():
        with pytest.raises((ValueError, OSError), match=said):
            action()


# ---- Tensor parallelism ----


@pytest.mark.cpu_only("Lightning's strategies know devices by name")
@pytest.mark.ranks(4, timeout_s=120)
@pytest.mark.parametrize(("stage", "tensor"), [(3, 2), (1, 4)])
def test_a_module_that_splits_itself_trains_as_in_one_process(
    group: Group, stage: int, tensor: int, tmp_path: Path
) -> None:
    """As under ModelParallelStrategy, ranks along "tensor_parallel" get the same batches."""
    import lightning_loops as loops
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    class Splits(loops.Module):
        def build(self) -> None:
            blocks = [nn.Linear(loops.WIDTH, 8), nn.Tanh(), nn.Linear(8, loops.WIDTH)]
            head = nn.Linear(loops.WIDTH, 3)
            self.net = nn.ModuleDict({"blocks": nn.Sequential(*blocks), "head": head})

        def configure_model(self) -> None:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net["blocks"], self.device_mesh["tensor_parallel"], plan)

    module, fields = Splits(loops.sgd), {"tensor_parallel_size": tensor}
    options = {"max_epochs": 1, "gradient_clip_val": 0.05}
    _, weights, trainer = loops.fit(group, stage, module, fields=fields, **options)
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    by_rank: list[Any] = [None] * group.world_size
    dist.all_gather_object(by_rank, module.seen)

    alone = Splits(loops.sgd)
    optimizer = loops.sgd(alone)
    num_data = 4 // tensor
    for of_step in zip(*by_rank[::tensor], strict=True):
        for batch in of_step:
            (alone.loss_of(batch) / num_data).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in weights.items():
        torch.testing.assert_close(value, alone.state_dict()[name], msg=name)

    again = Splits(loops.sgd)
    more = options | {"max_epochs": 1, "ckpt_path": tmp_path / "all.ckpt"}
    _, resumed, _ = loops.fit(group, stage, again, fields=fields, **more)
    for name, value in resumed.items():  # it has nothing left to train
        torch.testing.assert_close(value, weights[name], msg=name)


@pytest.mark.cpu_only("Lightning's strategies know devices by name")
@pytest.mark.ranks(2, timeout_s=120)
def test_fabric_shards_a_model_that_is_split(group: Group) -> None:
    """Over the ranks that have the same part: here each one by itself."""
    import lightning_loops as loops
    from lightning.fabric import Fabric
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from zero_engine.integrations.lightning import ZeroFabricStrategy

    loops.join(group)
    strategy = ZeroFabricStrategy(stage=3, min_unit_bytes=0, tensor_parallel_size=2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    plain = nn.Linear(6, 8)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8))
    parallelize_module(
        model,
        strategy.device_mesh["tensor_parallel"],
        {"0": ColwiseParallel(output_layouts=Replicate())},
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    x = torch.ones(4, 6)
    fabric.backward(model(x).square().mean())
    optimizer.step()
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    found = zero_engine.full_param(model.module[0].weight)
    torch.testing.assert_close(found, plain.weight.detach())


@pytest.mark.ranks(2, timeout_s=120)
def test_a_number_of_parts_that_ranks_cannot_have_is_refused(group: Group) -> None:
    """Before anything is sharded."""
    import lightning_loops as loops

    for wrong in (3, 0, "auto"):
        with pytest.raises(ConfigError, match="divisor of the 2 ranks"):
            loops.fit(group, 2, loops.Module(), fields={"tensor_parallel_size": wrong})
