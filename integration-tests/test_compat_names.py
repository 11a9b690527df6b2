"""Names that DeepSpeed's scripts import: each does what it promises, under DeepSpeed's name too."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_deepspeed as deepspeed
import zero_deepspeed.schedules
import zero_engine
from deepspeed_folders import Form, save_as_deepspeed
from packaging.version import Version
from torch import Tensor, nn
from zero_comm import Group
from zero_deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zero_deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zero_engine import ConfigError, FileError, Precision, ZeroConfig

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
    _compare_adams(Group.solo(), True, device="cuda")


def _compare_adams(group: Group, is_decoupled: bool, *, device: str = "cpu") -> None:
    plain = parity.build(parity.tiny_float32).to(device)
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
        model = parity.build(parity.tiny_float32).to(device)
        config = {"train_batch_size": 2 * group.world_size, "gradient_clipping": 0.0}
        config |= {"zero_optimization": zero}
        optimizer = make(model.parameters())
        engine, same, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        assert same is optimizer and type(optimizer).__name__ == name
        engines.append(engine)

    for step in range(3):
        data = [tensor.to(device) for tensor in parity.batch(step, 0, group.rank)]
        parity.finish_step(parity.loss_of(ddp, data), plain_optimizer)
        for engine in engines:
            engine.backward(parity.loss_of(engine, data))
            engine.step()

    for engine in engines:
        found = zero_engine.full_state_dict(engine.module)
        if group.rank == 0:
            torch.testing.assert_close(found, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


def _cpu_adam(*arguments: Any) -> DeepSpeedCPUAdam:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # without a compiler: plain torch, the same
        return DeepSpeedCPUAdam(*arguments)


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
        assert optimizer.cur_scale == optimizer.loss_scale == engine.cur_scale == expected
        assert loss_scaler.cur_scale == loss_scaler.loss_scale == expected
        loss = engine(torch.full((2, 4), 0.5 + group.rank, dtype=torch.float16)).float().mean()
        engine.backward(loss * factor)
        engine.step()

    assert same is optimizer and loss_scaler.dynamic and engine.skipped_steps == 1
    assert type(optimizer).__name__ == "DeepSpeedCPUAdam"
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    _, plain, *_ = deepspeed.initialize(model=other, optimizer=parity.adamw(other), config=config)
    for copied in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert type(copied) is torch.optim.AdamW
        assert copied.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert plain.cur_scale == plain.loss_scaler.cur_scale == 1 and not plain.loss_scaler.dynamic


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
            assert torch.equal(found[name], value.float()), name
    without = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert without.keys() == expected.keys() - {"frozen"}
    with pytest.raises(FileError, match="elsewhere"):
        get_fp32_state_dict_from_zero_checkpoint(folder, "elsewhere")


# ---- Other names ----


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
    assert torch.equal(pinned, tensor) and (pinned is tensor) == is_cpu


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
    for name in ("runtime.zero.stage3", "_install", "utils.numa", "pipe"):
        try:
            __import__("deepspeed." + name)
        except ModuleNotFoundError as error:
            assert error.name == "deepspeed." + name
            assert "here, by deepspeed.install(); what there is: deepspeed.acc" in str(error)
            assert ", deepspeed.runtime.lr_schedules, " in str(error)
            assert ", deepspeed._" not in str(error)
        else:
            raise AssertionError(name)
    import torch
    model = torch.nn.Linear(2, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=FusedAdam(model.parameters()),
        config={"train_batch_size": 2, "zero_optimization": {"stage": 3}},
    )
    engine.backward(engine(torch.ones(2, 2)).sum())
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
