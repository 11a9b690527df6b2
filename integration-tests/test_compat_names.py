"""Names that DeepSpeed's scripts import: each does what it promises, under DeepSpeed's name too."""

from __future__ import annotations

import copy
import importlib
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections import defaultdict, namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parity
import pytest
import torch
import zero_deepspeed as deepspeed
import zero_deepspeed.load
import zero_deepspeed.schedules
import zero_engine
import zero_offload
import zero_partition.seams
from deepspeed_folders import Form, save_as_deepspeed
from packaging.version import Version
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zero_deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zero_engine import ConfigError, FileError, Precision, ZeroConfig
from zero_engine.engine import EngineConfig

pytestmark = pytest.mark.xdist_group("ranks")


# ---- Optimizers ----

BETAS, EPS, DECAY = (0.8, 0.9), 1e-6, 0.1


@pytest.mark.parametrize("is_decoupled", [True, False], ids=["adamw", "adam"])
def test_deepspeeds_adams_train_as_torchs(group: Group, is_decoupled: bool) -> None:
    """Arguments go by position in many a script, and the two classes have different orders."""
    _compare_adams(group, is_decoupled)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_deepspeeds_adams_take_parameters_of_a_device() -> None:
    """`zero.Init` makes them there; initialize() brings what is stepped to the host."""
    _compare_adams(Group.solo("cuda"), True)


def _compare_adams(group: Group, is_decoupled: bool) -> None:
    plain = parity.build(parity.tiny_float32).to(group.device)
    ddp = parity.as_ddp(plain, group)
    kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    plain_optimizer = kind(plain.parameters(), 1e-2, BETAS, EPS, DECAY)
    engines = []
    for zero, name, make in (
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "DeepSpeedCPUAdam",
            lambda p: _cpu_adam(p, 1e-2, True, BETAS, EPS, DECAY, False, is_decoupled),
        ),
        (
            {"stage": 3},
            "FusedAdam",
            lambda p: FusedAdam(p, 1e-2, True, BETAS, EPS, is_decoupled, DECAY),
        ),
    ):
        model = parity.build(parity.tiny_float32).to(group.device)
        config = {"train_batch_size": 2 * group.world_size, "gradient_clipping": 0.0}
        config |= {"zero_optimization": zero}
        optimizer = make(model.parameters())
        engine, same, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        assert same is optimizer and type(optimizer).__name__ == name
        engines.append(engine)

    for step in range(3):
        data = [tensor.to(group.device) for tensor in parity.batch(step, 0, group.rank)]
        parity.finish_step(parity.loss_of(ddp, data), plain_optimizer)
        for engine in engines:
            engine.backward(parity.loss_of(engine, data))
            engine.step()

    for engine in engines:
        found = zero_engine.full_state_dict(engine.module)
        if group.rank == 0:
            assert_close(found, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


def _cpu_adam(*arguments: Any) -> DeepSpeedCPUAdam:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # without a compiler: plain torch, the same
        return DeepSpeedCPUAdam(*arguments)


@pytest.mark.cpu_only("they step tensors of the CPU")
@pytest.mark.parametrize("name", ["Adagrad", "Lion"])
def test_deepspeeds_other_cpu_optimizers_train_as_ours(group: Group, name: str) -> None:
    """Arguments go by position; fp32 state of 16-bit parameters, without masters."""
    kind = getattr(getattr(deepspeed.ops, name.lower()), f"DeepSpeedCPU{name}")
    plain = getattr(zero_offload, f"CPU{name}")
    given = (0.1, 1e-6, 0.2) if name == "Adagrad" else (0.1, (0.8, 0.9), 0.2)
    named = {"lr": 0.1, "weight_decay": 0.2} | (
        {"eps": 1e-6} if name == "Adagrad" else {"betas": (0.8, 0.9)}
    )
    models = [parity.build(parity.tiny_float32).bfloat16() for _ in range(2)]
    theirs = kind(models[0].parameters(), *given)
    ours = plain(models[1].parameters(), **named, masters=False, state_dtype=torch.float32)
    for model, optimizer in zip(models, (theirs, ours), strict=True):
        for step, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 0.5 + step)
        optimizer.step()

    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert equal(mine, other)
    half = kind(models[1].parameters(), fp32_optimizer_states=False)
    half.step()
    param = next(models[1].parameters())
    assert {v.dtype for n, v in half.state[param].items() if n != "step"} == {torch.bfloat16}
    if name == "Adagrad":
        with pytest.raises(ConfigError, match="amsgrad"):
            kind(models[0].parameters(), amsgrad=True)


def test_what_torchs_fused_adam_cannot_do_is_refused() -> None:
    """Else another rule would be trained by."""
    params = [nn.Parameter(torch.ones(2))]

    for name in ("bias_correction", "set_grad_none"):
        with pytest.raises(ConfigError, match=rf"FusedAdam\({name}=False\): expected True"):
            FusedAdam(params, **{name: False})


# ---- What engines and their optimizers are asked ----


def test_an_optimizer_tells_the_loss_scale_as_it_is_now(group: Group) -> None:
    """It is logged in every step, and it is the first to tell that training diverges."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"train_batch_size": 4, "fp16": fp16, "zero_optimization": zero}
    optimizer = _cpu_adam(model.parameters())
    engine, same, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loss_scaler = optimizer.loss_scaler

    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        expected = 16.0 if step < 2 else 8.0
        assert optimizer.overflow == loss_scaler.overflow == (step == 2)
        assert optimizer.cur_scale == optimizer.loss_scale == engine.cur_scale == expected
        assert loss_scaler.cur_scale == loss_scaler.loss_scale == expected
        loss = engine(torch.full((2, 4), 0.5 + group.rank, dtype=torch.float16)).float().mean()
        engine.backward(loss * factor)
        engine.step()

    assert same is optimizer and loss_scaler.dynamic and engine.skipped_steps == 1
    assert (loss_scaler.cur_iter, loss_scaler.last_overflow_iter) == (3, 1)
    assert (loss_scaler.scale_window, loss_scaler.min_scale, loss_scaler.delayed_shift) == (
        1000,
        1,
        1,
    )
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        _ = loss_scaler.nothing
    assert type(optimizer).__name__ == "DeepSpeedCPUAdam"
    assert optimizer.optimizer is optimizer and optimizer.dynamic_loss_scale
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    _, plain, *_ = deepspeed.initialize(model=other, optimizer=parity.adamw(other), config=config)
    for copied in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert type(copied) is torch.optim.AdamW
        assert copied.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert plain.cur_scale == plain.loss_scaler.cur_scale == 1 and not plain.loss_scaler.dynamic
    assert not hasattr(plain.loss_scaler, "cur_iter")


# ---- Checkpoints as one state dict ----


@pytest.mark.parametrize(
    "form",
    [Form(stage=3, world_size=2), Form(stage=2, world_size=3, dtype=torch.bfloat16, gap=1), None],
    ids=["stage 3", "stage 2, bf16", "ours"],
)
def test_what_was_saved_is_put_together_in_fp32(ranks, tmp_path: Path, form: Form | None) -> None:
    """Scripts of evaluation begin with it, long after a run has ended, whoever trained."""
    if form is None:
        _check_state_dict(tmp_path, "step-2", ranks(2).run(_save, folder=str(tmp_path))[0])
        return
    model = parity.build(parity.tiny_float32)
    model.frozen.data.copy_(model.frozen.data.bfloat16())  # what does not train is in 16 bits there
    optimizer = parity.adamw(model)
    parity.run_steps(model, optimizer, range(2), rank=0)
    save_as_deepspeed(tmp_path, model, optimizer, step=2, form=form)
    _check_state_dict(tmp_path, "global_step2", dict(model.state_dict()))


def _save(group: Group, folder: str) -> dict[str, Tensor]:
    """Masters, where the model computes in bf16."""
    config = ZeroConfig(3, precision=Precision(params=torch.bfloat16))
    model, optimizer = parity.build_sharded(group, config, make=parity.tiny_float32)
    zero_engine.save(folder, model, optimizer, step=2)
    named = model.named_parameters(remove_duplicate=False)
    return {n: zero_engine.full_param(p).float() for n, p in named} | dict(model.named_buffers())


def _check_state_dict(folder: Path, tag: str, expected: dict[str, Tensor]) -> None:
    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert found["head.weight"] is found["embed.weight"]
    for options in ({"tag": tag}, {"lazy_mode": True}):
        again: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(folder, **options)
        found = {name: value.contiguous() for name, value in again.items()}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert again[name].shape == value.shape
            assert again[name].dtype == found[name].dtype == torch.float32
            assert equal(found[name], value.float()), name
    without = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert without.keys() == expected.keys() - {"frozen"}
    with pytest.raises(FileError, match="elsewhere"):
        get_fp32_state_dict_from_zero_checkpoint(folder, "elsewhere")


def test_weights_go_into_a_plain_model_and_into_a_folder(ranks, tmp_path: Path) -> None:
    """As evaluation and conversion want them, without ranks."""
    names = deepspeed.utils.zero_to_fp32
    expected = ranks(2).run(_save, folder=str(tmp_path / "run"))[0]
    model = parity.build(parity.tiny_float32)
    same = names.load_state_dict_from_zero_checkpoint(model, tmp_path / "run")
    names.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", tmp_path / "torch")
    names.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "run", tmp_path / "safe", max_shard_size="1KB", safe_serialization=True
    )

    assert same is model
    of_torch = torch.load(tmp_path / "torch" / "pytorch_model.bin")
    for name, value in model.state_dict().items():
        assert equal(value, expected[name].float())
        assert equal(of_torch[name], value)
    assert len([*(tmp_path / "safe").glob("*.safetensors")]) > 1
    for wrong in ({"max_shard_size": "5 apples"}, {"exclude_frozen_parameters": True}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            names.convert_zero_checkpoint_to_fp32_state_dict(
                tmp_path / "run", tmp_path / "other", safe_serialization=True, **wrong
            )


def test_what_is_cloned_is_written_without_what_is_beside_it(tmp_path: Path) -> None:
    """torch.save writes the whole memory that a tensor is a part of."""
    large = torch.arange(100_000.0)
    state = {"a": large[:4], "b": [large[4:6], ("c", large[6:7])], "n": 3}

    cloned = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(state)

    torch.save(cloned, tmp_path / "cloned")
    assert (tmp_path / "cloned").stat().st_size < 4_000 < large.nbytes
    named = namedtuple("Named", "first second")(large[:2], defaultdict(list, {"x": large[2:4]}))
    again = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(named)
    assert type(again) is type(named) and again.second["new"] == []
    assert equal(again.second["x"], large[2:4]) and again.first.untyped_storage().nbytes() == 8
    assert cloned["n"] == 3 and cloned["b"][1][0] == "c"
    assert equal(cloned["a"], large[:4]) and equal(cloned["b"][1][1], large[6:7])


# ---- Other names ----


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("returns_bias", [True, False])
def test_a_tiled_layer_computes_what_the_whole_layer_does(
    group: Group, bias: bool, returns_bias: bool
) -> None:
    """Of whole numbers, whose sums have no order; at stage 3, with gradients of each tile."""

    class ReturnsBias(nn.Linear):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return nn.functional.linear(x, self.weight), self.bias

    torch.manual_seed(0)
    whole = nn.Linear(7, 5, bias=bias)
    for param in whole.parameters():
        param.data = torch.randint(-4, 5, param.shape).float()
    names = deepspeed.zero
    tiled = (names.TiledLinearReturnBias if returns_bias else names.TiledLinear)(
        *(7, 5, bias),
        in_splits=3,
        out_splits=2,
        linear_cls=ReturnsBias if returns_bias else nn.Linear,
        init_linear=whole,
    )
    x = torch.randint(-4, 5, (2, 7)).float()
    expected = whole(x)
    expected.sum().backward()
    engine, *_ = deepspeed.initialize(
        model=tiled,
        optimizer=torch.optim.SGD(tiled.parameters(), 1.0),
        config={"train_batch_size": group.world_size, "zero_optimization": {"stage": 3}},
    )

    got = engine(x)
    if returns_bias:
        assert (got[1] is not None) == bias
        got = got[0] if got[1] is None else got[0] + got[1]
    assert equal(got, expected)
    engine.backward(got.sum())
    tops, lefts = tiled.out_parts, tiled.in_parts
    for o, i in itertools.product(range(2), range(3)):
        grad = zero_engine.full_grad(tiled.linears[o][i].weight)
        assert equal(grad, whole.weight.grad[tops[o] : tops[o + 1], lefts[i] : lefts[i + 1]])

    assert [name for name, _ in tiled.named_parameters() if name.endswith("bias")] == [
        f"linears.{o}.2.bias" for o in range(2) if bias
    ]
    alone = names.TiledLinear(7, 5, bias, input_is_already_split=True, init_linear=whole)
    assert equal(alone(x), expected)
    halves = names.TiledLinear(7, 5, bias, 2, input_is_already_split=True, init_linear=whole)
    assert equal(halves(x.split([4, 3], dim=-1)), expected)
    for wrong in ({"in_splits": 8}, {"out_splits": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} from 1"):
            names.TiledLinear(7, 5, **wrong)
    with pytest.raises(ConfigError, match=r"shape \(5, 7\)"):
        names.TiledLinear(7, 5, init_linear=nn.Linear(5, 7))


def test_parameters_of_stage_3_have_deepspeeds_attributes(group: Group) -> None:
    """Scripts choose by them what to gather before they read."""
    status = deepspeed.runtime.zero.partition_parameters.ZeroParamStatus
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = {"stage": 3, "stage3_param_persistence_threshold": 8}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=parity.adamw(model),
        config={"train_batch_size": group.world_size, "zero_optimization": config},
    )
    weight, bias = model[1].weight, model[1].bias

    assert [param.ds_id for param in model.parameters()] == [0, 1, 2, 3]
    assert (weight.ds_numel, weight.ds_shape, weight.ds_persist) == (64, weight.shape, False)
    assert bias.ds_persist and bias.ds_status == status.AVAILABLE
    assert weight.ds_status == status.NOT_AVAILABLE != bias.ds_status
    local = zero_engine.local_param(weight)
    assert weight.ds_tensor.ds_numel == weight.ds_tensor.numel() == local.numel()
    fetched = [p for p in model.parameters() if p.ds_status == status.NOT_AVAILABLE]
    with deepspeed.zero.GatheredParameters(fetched):
        assert weight.ds_status == status.AVAILABLE
        values = weight.clone()
    assert weight.ds_status == status.NOT_AVAILABLE and values.shape == (8, 8)
    engine(torch.ones(1, 8))
    zero_engine.unshard(model, engine.optimizer)
    again = pickle.loads(pickle.dumps(model))[1].weight
    assert equal(again, weight) and again.ds_status is status.AVAILABLE


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_engine_is_compiled_as_deepspeeds(group: Group, stage: int) -> None:
    """With the arguments in its order; at stage 3 the error says what to compile."""
    losses = []
    for compiles in (False, True):
        model = parity.build(parity.tiny_float32)
        zero = {"stage": stage}
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=parity.adamw(model),
            config={"train_batch_size": 2 * group.world_size, "zero_optimization": zero},
        )
        if compiles and stage == 3:
            with pytest.raises(ConfigError, match=r"block\.compile\(\)"):
                engine.compile()
            continue
        if compiles:
            for wrong in ({"schedule": []}, {"compiled_autograd_enabled": True}):
                with pytest.raises(ConfigError, match="DeepCompile"):
                    engine.compile(**wrong)
            engine.compile("aot_eager", {"dynamic": False})
        assert engine.is_compiled == compiles
        losses.append(parity.run_steps(engine, engine.optimizer, range(2), rank=group.rank))

    assert losses[0] == losses[-1]


def test_parts_of_small_parameters_are_written(group: Group) -> None:
    """Scripts write each rank's part of every parameter, and know nothing of thresholds."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = {"stage": 3, "stage3_param_persistence_threshold": 8}
    deepspeed.initialize(
        model=model,
        optimizer=parity.adamw(model),
        config={"train_batch_size": group.world_size, "zero_optimization": config},
    )
    names, expected = deepspeed.utils, {}
    for name, param in model.named_parameters():
        expected[name] = names.safe_get_full_fp32_param(param) * 2 + 1
        part = names.safe_get_local_fp32_param(param)
        names.safe_set_local_fp32_param(param, part * 2 + 1)

    for name, param in model.named_parameters():
        assert equal(names.safe_get_full_fp32_param(param), expected[name])


def test_estimates_are_those_of_the_plan(capsys) -> None:
    """DeepSpeed's formulas know nothing of what is allocated here."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    live = deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live
    cold = deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs
    two = deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs

    live(model, num_gpus_per_node=4, num_nodes=2)
    table = capsys.readouterr().out
    host, device, largest = cold(1e6, 1e5, 4, 2, cpu_offload=False, cpu_offload_params=False)
    with pytest.raises(ConfigError, match="largest_layer_params from 1"):
        cold(100, 200)
    config = ZeroConfig(3, precision=Precision(params=torch.bfloat16))
    layers = nn.Sequential(*(nn.Linear(10**5, 1, False, device="meta") for _ in range(10)))
    planned = zero_engine.plan(layers, config, world_size=8, ranks_per_node=4)

    assert table.count("\n") == 5 and "2 nodes of 4 GPUs" in table
    assert (host, device, largest) == (0, planned.memory.before_step.total_bytes, 2 * 10**5)
    assert two(10**6, 4, 2, True)[0] >= 12 * 10**6 / 2 > two(10**6, 4, 2, False)[0] == 0


def test_a_loader_repeats_and_memory_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Loops over steps draw batches for ever; and say now and then what is in use."""
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    with caplog.at_level("INFO"):
        deepspeed.runtime.utils.see_memory_usage("not forced")
        deepspeed.runtime.utils.see_memory_usage("after a step", force=True)

    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert [record.message[:12] for record in caplog.records] == ["after a step"]
    assert "GiB" in caplog.text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("zero_engine.compat.deepspeed.initialize", deepspeed.initialize),
        ("zero_engine.compat.deepspeed.zero.Init", deepspeed.zero.Init),
        ("zero_engine.compat.deepspeed.ops.adam.FusedAdam", FusedAdam),
        ("zero_engine.deepspeed.EngineConfig", EngineConfig),
        ("zero_engine.compat.deepspeed.__version__", deepspeed.__version__),
        ("zero_engine.checkpoint.DeepSpeedLoadReport", zero_deepspeed.load.DeepSpeedLoadReport),
        ("zero_engine.deepspeed.WarmupLR", zero_deepspeed.schedules.WarmupLR),
        ("zero_partition.AtRestError", zero_partition.ShardedParamError),
        ("zero_partition.seams.Homes", zero_partition.seams.OffloadBackends),
        ("zero_partition.seams.plan_room", zero_partition.seams.plan_allocation),
    ],
)
def test_old_paths_work_and_say_the_new_one(old: str, new: Any) -> None:
    """For one version; as they were written: modules are imported, names come from them."""
    module, _, name = old.rpartition(".")
    home = importlib.import_module(module)
    vars(home).pop(name, None)  # a name that was asked for is kept

    with pytest.warns(DeprecationWarning, match=rf"^{old} is zero_\w+\.") as caught:
        found = getattr(home, name)

    assert found is new and caught[0].filename == __file__
    assert getattr(home, name) is new
    with pytest.raises(AttributeError, match="nothing"):
        home.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module(f"{module}.nothing")


def test_old_modules_are_attributes_too() -> None:
    """As they were without an import of their own; in a process that has not imported them."""
    code = (
        "import warnings, zero_engine; warnings.simplefilter('ignore'); "
        "old = zero_engine.deepspeed; print(old.WarmupLR.__name__, old.EngineConfig.__name__)"
    )

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stdout.split() == ["WarmupLR", "EngineConfig"]


def test_an_optimizer_that_has_such_names_itself_keeps_them(group: Group) -> None:
    """Many wrap another one as `self.optimizer`, and step that."""

    class Wrapping(torch.optim.SGD):
        overflow = "its own"

        def step(self, closure: Any = None) -> Any:
            self.optimizer.step()  # type: ignore[attr-defined]
            return super().step(closure)

    model = nn.Linear(2, 2)
    optimizer = Wrapping(model.parameters(), 0.1)
    optimizer.optimizer = inner = SimpleNamespace(step=lambda: None)  # type: ignore[attr-defined]
    config = {"train_batch_size": group.world_size, "zero_optimization": {"stage": 0}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()

    assert optimizer.optimizer is inner and optimizer.overflow == "its own"
    assert optimizer.cur_scale == 1.0


@pytest.mark.parametrize("form", ["a list", "a generator", "names", "groups", "groups of names"])
def test_parameters_may_be_given_in_any_form(group: Group, form: str) -> None:
    """To an optimizer by name; what can be iterated over once is."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = [param.clone() for param in model.parameters()]
    given: Any = {
        "a list": list(model.parameters()),
        "a generator": model.parameters(),
        "names": model.named_parameters(),
        "groups": [{"params": part.parameters()} for part in model],
        "groups of names": [{"params": model.named_parameters()}],
    }[form]
    config = {"train_batch_size": group.world_size, "zero_optimization": {"stage": 1}}
    optimizer = {"type": "SGD", "params": {"lr": 0.5}}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=given, config=config | {"optimizer": optimizer}
    )
    engine.backward(engine(torch.ones(1, 2)).square().sum())
    engine.step()

    for param, was in zip(model.parameters(), before, strict=True):
        assert not equal(zero_engine.full_param(param), was)


def test_logs_follow_the_environment() -> None:
    """`see_memory_usage` does nothing but write a line."""
    code = (
        "import zero_deepspeed as deepspeed; "
        "deepspeed.runtime.utils.see_memory_usage('after a step', force=True)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"ZERO_LOG": "info"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "after a step" in ran.stderr


def test_without_the_package_its_files_are_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zero_engine is installed without it by whoever writes a plain loop."""
    monkeypatch.setattr(zero_engine.readers, "find_reader", lambda: None)
    model, file = nn.Linear(2, 2), {"train_batch_size": 2}
    for call in (
        lambda: ZeroConfig.from_deepspeed(file),
        lambda: EngineConfig.from_deepspeed(file),
        lambda: zero_engine.initialize(model=model, config=file),
        lambda: zero_engine.load_deepspeed(tmp_path, model),
    ):
        with pytest.raises(ConfigError, match=r"install zero-deepspeed$"):
            call()


def test_names_inside_deepspeed_are_there(ranks) -> None:
    """`import deepspeed` is enough for most of them in many a script."""
    runtime = deepspeed.runtime

    assert deepspeed.DeepSpeedEngine is runtime.engine.DeepSpeedEngine is zero_engine.Engine
    assert runtime.lr_schedules.WarmupCosineLR is zero_deepspeed.schedules.WarmupCosineLR
    assert runtime.zero.Init is deepspeed.zero.Init
    assert deepspeed.ops.adam.FusedAdam is FusedAdam
    assert Version(deepspeed.__version__) >= Version("0.19")
    assert deepspeed.DeepSpeedConfigError is runtime.config.DeepSpeedConfigError
    assert issubclass(ConfigError, deepspeed.DeepSpeedConfigError)


def test_an_accelerator_knows_its_dtypes() -> None:
    """Scripts choose between fp16 and bf16 by it."""
    accelerator, tensor = deepspeed.get_accelerator(), torch.arange(6).view(2, 3)
    is_cpu, dtypes = accelerator.device_name() == "cpu", accelerator.supported_dtypes()

    assert dtypes[0] is torch.float32
    assert (torch.bfloat16 in dtypes) == accelerator.is_bf16_supported() >= is_cpu
    assert (torch.float16 in dtypes) == accelerator.is_fp16_supported() >= is_cpu
    pinned = accelerator.pin_memory(tensor)
    assert equal(pinned, tensor) and (pinned is tensor) == is_cpu


# ---- Under DeepSpeed's own name ----

INSTALLED = """
    import importlib, sys
    import zero_deepspeed as ours

    sys.path.insert(0, sys.argv[1])
    try:
        ours.install()
    except ours.DeepSpeedConfigError as error:
        assert f"DeepSpeed is not installed, got {sys.argv[1]}/deepspeed/__init__.py" in str(error)
        assert "pip uninstall deepspeed" in str(error)
    else:
        raise AssertionError("there are two of that name")
    assert "deepspeed" not in sys.modules
    sys.path.remove(sys.argv[1])

    ours.install()
    ours.install()

    import deepspeed
    import deepspeed.comm as dist
    import deepspeed.utils.zero_to_fp32
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
    from deepspeed.utils import safe_get_full_grad
    from zero_deepspeed import runtime, utils

    assert deepspeed is ours and deepspeed.comm is dist
    assert deepspeed.utils is utils and utils.safe_get_full_grad is safe_get_full_grad
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "deepspeed":
            assert module is sys.modules["zero_" + name], name
            assert module.__name__ == module.__spec__.name == "zero_" + name
    assert importlib.reload(deepspeed.runtime) is runtime
    for name in ("runtime.pipe", "configuration", "utils.numa", "pipe"):
        try:
            __import__("deepspeed." + name)
        except ModuleNotFoundError as error:
            assert error.name == "deepspeed." + name
            assert "here, by deepspeed.install(); what there is: deepspeed.acc" in str(error)
            assert ", deepspeed.runtime.lr_schedules, " in str(error)
            assert "deepspeed.names" not in str(error)
        else:
            raise AssertionError(name)
    import torch
    model = torch.nn.Linear(2, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=FusedAdam(model.parameters()),
        config={"train_batch_size": 2, "zero_optimization": {"stage": 3}},
    )
    engine.backward(engine(torch.ones(2, 2, device=engine.device)).sum())
    engine.step()
    print("trained", engine.global_steps)
"""


def test_a_script_imports_deepspeed_where_it_is_not_installed(tmp_path: Path) -> None:
    """A hundred files import it by that name; two copies of a module would not know each other.

    Whoever has both must know which one trains: install() gives way to DeepSpeed itself.
    """
    (tmp_path / "deepspeed").mkdir()  # of configurations, as many projects have: no package
    (tmp_path / "deepspeed" / "ds_config.json").write_text("{}")
    theirs = tmp_path / "site" / "deepspeed" / "__init__.py"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(INSTALLED))

    ran = subprocess.run(
        [sys.executable, script, tmp_path / "site"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "trained 1\n"
