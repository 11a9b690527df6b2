"""DeepSpeed's names: a script runs with one line changed, and names mean what they mean there."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import attrs
import parity
import pytest
import torch
import zero_ckpt
import zero_deepspeed as deepspeed
import zero_deepspeed.schedules
import zero_engine
from deepspeed_script import Net, images
from scripts import WORLD_SIZE, launch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from training import assert_weights_of
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_deepspeed import utils
from zero_engine import ConfigError, NotBuiltError, ZeroConfig
from zero_engine.engine import EngineConfig
from zero_partition import memory_report

pytestmark = pytest.mark.xdist_group("ranks")

SCRIPT: Final = Path(__file__).with_name("deepspeed_script.py")


# ---- A whole script ----


def test_a_deepspeed_script_runs_with_one_line_changed(tmp_path: Path) -> None:
    """It is the reason for this package: nobody rewrites a script to try us."""
    settings = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4},
        },
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(settings))
    arguments = ["--deepspeed", "--deepspeed_config", str(path), "--out", str(tmp_path / "run")]

    launch(str(SCRIPT), arguments)

    reports = [json.loads((tmp_path / f"run.{rank}.json").read_text()) for rank in range(2)]
    expected = _train_alone(settings)
    for rank, report in enumerate(reports):
        for key in ("norms", "lr", "weight"):
            assert_close(torch.tensor(report[key]), torch.tensor(expected[key]))
        assert_close(report["losses"], expected["losses"][rank])
        assert report["steps"] == len(expected["norms"])


def _train_alone(settings: dict[str, Any]) -> dict[str, Any]:
    """The same in one process, with plain torch: both ranks' micro-batches, one after another."""
    torch.manual_seed(0)
    with torch.device(deepspeed.get_accelerator().device_name()):  # which draws others than the CPU
        net = Net()
    net, (pictures, labels) = net.cpu(), images().tensors
    options = settings["optimizer"]["params"]
    # DeepSpeed's Adam is AdamW, unless it is told otherwise.
    optimizer = torch.optim.AdamW(net.parameters(), **options)
    count = settings["gradient_accumulation_steps"]
    size = settings["train_batch_size"] // WORLD_SIZE // count
    losses: list[list[float]] = [[] for _ in range(WORLD_SIZE)]
    norms = []
    scheduler = zero_deepspeed.schedules.WarmupLR(optimizer, **settings["scheduler"]["params"])
    for epoch in range(2):
        orders = []
        for rank in range(WORLD_SIZE):
            sampler = DistributedSampler(labels, num_replicas=WORLD_SIZE, rank=rank)
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        for index in range(len(orders[0]) // size):
            for rank, order in enumerate(orders):
                mine = order[index * size : (index + 1) * size]
                outputs = net(pictures[mine])
                loss = nn.functional.cross_entropy(outputs, labels[mine])
                (loss / count / WORLD_SIZE).backward()
                losses[rank].append(loss.item())
            if (index + 1) % count == 0:
                norms.append(net.fc1.weight.grad.norm().item())
                nn.utils.clip_grad_norm_(net.parameters(), settings["gradient_clipping"])
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    lr = optimizer.param_groups[0]["lr"]
    return {"losses": losses, "norms": norms, "lr": lr, "weight": net.fc2.weight.tolist()}


# ---- Its parts ----


@pytest.mark.parametrize("stage", [1, 3])
def test_safe_accessors_read_and_write_by_parameter(group: Group, stage: int) -> None:
    """Gradient surgery and logging go by the model's parameters, whatever the stage.

    Scripts that log the norms of every parameter ask for all, and pass over None.
    """
    model, optimizer = parity.build_with_optimizer(make=parity.tiny_float32)
    plain, plain_optimizer = parity.build_with_optimizer(make=parity.tiny_float32)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ddp = parity.as_ddp(plain, group)
    data = parity.batch(0, 0, group.rank)
    engine.backward(parity.loss_of(engine, data))
    parity.loss_of(ddp, data).backward()
    engine.empty_partition_cache()  # between phases, with gradients that wait
    assert memory_report(model).slots_bytes == 0
    param, expected = model.blocks[1].up.weight, plain.blocks[1].up.weight

    assert equal(utils.safe_get_full_grad(param), expected.grad)
    assert equal(utils.safe_get_full_fp32_param(param), expected)
    assert utils.safe_get_local_grad(param).dim() == 1
    assert utils.safe_get_local_fp32_param(param).dim() == 1
    utils.safe_set_full_grad(param, torch.ones_like(expected))
    expected.grad.fill_(1.0)
    bias, plain_bias = model.blocks[1].up.bias, plain.blocks[1].up.bias
    utils.safe_update_full_grad_vectorized([bias], lambda grad, param: grad * param.numel())
    plain_bias.grad.mul_(13)
    engine.step()
    plain_optimizer.step()

    state = utils.safe_get_full_optimizer_state(param, "exp_avg")
    assert equal(state, plain_optimizer.state[expected]["exp_avg"])
    assert equal(utils.safe_get_full_fp32_param(bias), plain_bias)
    utils.safe_set_full_fp32_param(param, torch.zeros_like(expected))
    assert not utils.safe_get_full_fp32_param(param).any()
    utils.safe_set_full_optimizer_state(param, torch.ones_like(expected), "exp_avg")
    local = utils.safe_get_local_optimizer_state(param, "exp_avg")
    assert equal(local, torch.ones_like(local))
    utils.safe_set_local_optimizer_state(param, torch.zeros_like(local), "exp_avg")
    assert not utils.safe_get_full_optimizer_state(param, "exp_avg").any()
    for kind in ("full", "local"):
        for what in ("fp32_param", "grad"):
            assert getattr(utils, f"safe_get_{kind}_{what}")(model.frozen) is None
        ask = getattr(utils, f"safe_get_{kind}_optimizer_state")
        assert ask(model.frozen, "exp_avg") is None


class Experts(nn.Module):
    """Of which each rank uses another, called by index: the list has no forward to hook."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, chosen: int) -> Tensor:  # noqa: D102
        return x + self.experts[chosen](x).tanh()


class Mixture(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Experts(), Experts()

    def forward(self, x: Tensor, chosen: int) -> Tensor:  # noqa: D102
        return self.second(self.first(x, chosen), chosen).square().mean()


QUALIFIED: Final = f"{Experts.__module__}.{Experts.__qualname__}"


def test_leaf_modules_are_found_by_all_of_their_names() -> None:
    """Mixtures of experts are declared by class in one script, and by name in the next."""
    model = Mixture()
    first, second = model.first, model.second
    lists, layers = [first.experts, second.experts], [*first.experts, *second.experts]

    # What each function of DeepSpeed 0.19.8 returned for such a model, and which of them raised.
    assert utils.set_z3_leaf_modules(model, [nn.Linear, nn.ModuleList]) == [
        *(*first.experts, first.experts, *second.experts, second.experts)  # inner ones first
    ]
    assert utils.get_z3_leaf_modules(first) == [first.experts, *first.experts]
    assert utils.unset_z3_leaf_modules(model, ["Linear", "ModuleList", "Experts"])[-1] is second
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules(model, [QUALIFIED, "None"]) == [first, second]  # one will do
    assert utils.z3_leaf_module(second) and not utils.z3_leaf_module(model)
    assert utils.z3_leaf_parameter(layers[3].weight)
    utils.set_z3_leaf_module(second, False)
    assert not utils.z3_leaf_parameter(layers[3].weight)

    by_name, by_suffix = utils.set_z3_leaf_modules_by_name, utils.set_z3_leaf_modules_by_suffix
    assert by_name(model, ["second", "first"]) == ([second, first], [])
    assert by_name(model, ["second"], flag=False) == ([second], [])
    assert not utils.z3_leaf_module(second)
    assert by_suffix(model, ["perts", "s.1", "2"], raise_if_not_found=False) == (
        [*lists, layers[1], layers[3]],
        ["2"],
    )
    assert by_name(model, ["1", "first"], raise_if_not_found=False) == ([first], ["1"])
    assert utils.set_z3_leaf_modules(model, ["Lin"], raise_if_not_found=False) == []
    for wrong in (["Lin"], ["first"], []):
        for function in (utils.set_z3_leaf_modules, utils.unset_z3_leaf_modules):
            with pytest.raises(ValueError, match="there are Experts, Linear, Mixture, ModuleList"):
                function(model, wrong)
    for function in (by_name, by_suffix):
        with pytest.raises(ValueError, match=r"\['2'\], which fit none of this Mixture"):
            function(model, ["2", "first"])


@pytest.mark.parametrize(
    "section",
    [
        {"classes": ["torch.nn.modules.container.ModuleList"]},
        {"names": ["first", "second.experts"]},
        {"name_suffixes": ["xperts"]},
    ],
    ids=str,
)
def test_a_file_names_leaf_modules(group: Group, section: dict[str, Any]) -> None:
    """Ranks that gather by messages may then choose other experts: else they diverge."""
    plain, model = parity.build(Mixture), parity.build(Mixture)
    plain_optimizer, ddp = parity.adamw(plain), parity.as_ddp(plain, group)
    zero = {"stage": 3, "leaf_module": section}
    raw = {"train_batch_size": 4, "gradient_clipping": 0.0, "zero_optimization": zero}
    config = EngineConfig.from_deepspeed(raw, world_size=2)
    # Units as small as can be: else all of it were one, leaf or not.
    config = attrs.evolve(config, zero=attrs.evolve(config.zero, min_unit_bytes=0))
    by_messages, optimizer = parity.by_messages(patience_s=0.25), parity.adamw(model)
    engine, *_ = zero_engine.initialize(
        model=model, optimizer=optimizer, config=config, group=by_messages
    )

    for step in range(2):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + group.rank))
        chosen = (step + group.rank) % 2
        loss = engine(x, chosen)
        engine.backward(loss)
        engine.step()
        parity.finish_step(ddp(x, chosen), plain_optimizer)

    assert_weights_of(model, plain, group=group, what=str(section))


def test_mixtures_of_transformers_are_leaves_without_being_named() -> None:
    """As in DeepSpeed, whose files have no word of them: else they hang where ranks gather."""
    from transformers import MixtralConfig, MixtralForCausalLM  # takes the ranks seconds, above

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    found = []
    for said in ({}, {"classes": []}):
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
        zero = {"stage": 3, "leaf_module": said}
        deepspeed.initialize(model=model, config={"train_batch_size": 1, "zero_optimization": zero})
        found.append([type(leaf).__name__ for leaf in utils.get_z3_leaf_modules(model)])

    assert found == [["MixtralSparseMoeBlock"] * 2, []]


def test_what_no_leaf_is_by_a_file_is_said(group: Group) -> None:
    """A typo there is a divergence after hours."""
    section = {"classes": ["Expert"], "names": ["first", "third"], "name_suffixes": "4"}
    settings = {"train_batch_size": 4, "zero_optimization": {"stage": 3, "leaf_module": section}}
    said = r"classes: 'Expert', names: 'third', name_suffixes: '4'; nothing"
    model = Mixture()
    with pytest.warns(UserWarning, match=said) if not group.rank else nullcontext():
        deepspeed.initialize(model=model, optimizer=parity.adamw(model), config=settings)
    assert utils.get_z3_leaf_modules(model) == [model.first]

    if group.rank:
        return
    with pytest.warns(UserWarning, match=r"leaf_module\.names.*: a ZeroConfig has no place"):
        ZeroConfig.from_deepspeed(settings)
    settings["zero_optimization"]["stage"] = 2
    with pytest.warns(UserWarning, match=r"leaf_module\.names \(from stage 3 on\)"):
        EngineConfig.from_deepspeed(settings)


def test_a_parameter_may_be_external_before_its_model_is_sharded(group: Group) -> None:
    """DeepSpeed wants to be told in the constructor, where nobody knows the sharded model yet."""
    with deepspeed.zero.Init(dtype=torch.float64):
        owner, user = nn.Linear(3, 3), nn.Identity()
        deepspeed.zero.register_external_parameter(user, owner.weight)
    model = nn.ModuleDict({"owner": owner, "user": user})
    zero_engine.shard(model, None, ZeroConfig(3), group=group)

    deepspeed.zero.register_external_parameter(user, owner.weight)

    assert owner.weight.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
    deepspeed.zero.unregister_external_parameter(user, owner.weight)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Parameter"):
        deepspeed.zero.register_external_parameter(user, torch.ones(3))


def test_a_model_is_built_before_anybody_knows_what_auto_is(group: Group) -> None:
    """Sizes that follow from the model are in the same file as the stage it is built for."""
    settings = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        layer = nn.Linear(4, 4)
    assert layer.weight.untyped_storage().nbytes() == layer.weight.element_size(), "it rests whole"

    settings["zero_optimization"]["stage"] = "auto"
    with pytest.raises(ConfigError, match=r"^zero_optimization\.stage: expected a value for"):
        deepspeed.zero.Init(config_dict_or_path=settings)
    settings["zero_optimization"]["stages"] = 3
    with pytest.raises(ConfigError, match=r"mean zero_optimization\.stage\?"):
        deepspeed.zero.Init(config_dict_or_path=settings)


def test_init_builds_plainly_where_it_is_off_and_names_what_is_wrong() -> None:
    """Scripts decide by a flag, and keep the `with`; DeepSpeed's own files say "fp16"."""
    with deepspeed.zero.Init(enabled=False):
        assert not nn.Linear(2, 2).weight.isnan().any()

    for error, given, message in (
        (ConfigError, {"dtype": "fp16"}, r"floating-point torch\.dtype, got 'fp16'"),
        (ConfigError, {"mpu": 3}, r"zero\.Init\(\): expected mpu to have .*, got 3"),
        (NotBuiltError, {"remote_device": "cpu"}, "remote_device='cpu'"),
    ):
        with pytest.raises(error, match=message):
            deepspeed.zero.Init(**given)


def test_a_process_without_a_launcher_is_rank_zero_of_one(monkeypatch) -> None:
    """A script is tried out alone first."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert not deepspeed.comm.is_initialized()

    deepspeed.init_distributed(dist_init_required=False)
    deepspeed.comm.barrier()

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    assert parser.parse_args([]).deepspeed_config is None
    asked = (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size())
    assert (*asked, deepspeed.comm.get_local_rank()) == (0, 1, 0)
    assert deepspeed.comm.ReduceOp is torch.distributed.ReduceOp


def test_what_is_not_there_says_so() -> None:
    """Silence would be taken for consent. What is there is ours, under DeepSpeed's name."""
    for name in deepspeed.checkpointing.__all__:
        assert getattr(deepspeed.checkpointing, name) is getattr(zero_ckpt, name)

    said = "has no such name; what there is: DeepSpeedConfigError, Deep"
    with pytest.raises(AttributeError, match=said):
        deepspeed.init_inference(None)
    for given, message in (
        ({"mesh_param": (2, 1)}, r"mesh_param to be \(data ranks, sequence ranks\)"),
        ({"config": {}, "config_params": {}}, "expected config or config_params, got both"),
    ):
        with pytest.raises(ConfigError, match=message):
            deepspeed.initialize(model=nn.Linear(1, 1), **given)
    with pytest.raises(ConfigError, match="expected init_method 'env://' or None"):
        deepspeed.init_distributed(init_method="tcp://there:1")
