"""Wrong configuration files: each error starts with the path of the key and says what to do."""

from __future__ import annotations

import base64
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from zero_engine import ConfigError, FileError, ZeroConfig
from zero_engine.engine import EngineConfig

DOCUMENTED: Final = json.loads(Path(__file__).with_name("documented.json").read_text())
Z: Final = "zero_optimization"
PARAMS_ON_DISK: Final = {".stage": 3, ".offload_param": {"device": "nvme", "nvme_path": "/local"}}
LOCO: Final = {".stage": 3, ".zero_quantized_gradients": True}

# What the file says beside a train_batch_size of 8, and a part of the error. That starts with the
# last key, unless the row says "start ... part". A name that begins with a dot is of
# zero_optimization.
WRONG: Final[list[tuple[dict[Any, Any], str]]] = [
    # Names.
    ({"zero_optimisation": {"stage": 2}}, "mean zero_optimization?"),
    ({"stage3_prefetch_bucket_size": 1}, "mean zero_optimization.stage3_pre"),
    ({"bf16.loss_scale": 1}, "mean fp16.loss_scale?"),
    ({".gradient_clipping": 1.0}, "mean gradient_clipping?"),
    (
        {"scheduler.type": "OneCycle", "scheduler.params.max_lr": 1.0},
        "mean scheduler.params.cycle_max_lr?",
    ),
    ({".prefetch_bucket_size": 1, ".stage3_prefetch_bucket_size": 1}, ". ... one name"),
    ({".of_next_year": {}}, "expected"),
    ({"optimizer.type": "Adam", "optimizer.params.of_next_year": 1}, "expected"),
    ({"optimizer.type": "AdamX"}, "mean 'adam'? Pass any other as an object to initialize()"),
    ({"scheduler.type": "StepLR"}, "got 'StepLR'. Pass any other as an object to initialize()"),
    ({"gradient_cliping": 1.0}, "mean gradient_clipping?"),
    # Types and ranges, one of each kind.
    ({Z: True}, "expected an object"),
    ({".stage": "3"}, "from 0 to 3"),
    ({".stage": None}, "got None"),
    ({".sub_group_size": 1.5}, "an integer"),
    ({"fp16.enabled": "true"}, "true or false, got 'true'"),
    ({"optimizer.type": "Adam", "optimizer.params.lr": "1e-4"}, "a finite number"),
    ({"optimizer.type": "Adam", "optimizer.params.betas": 0.9}, "a list of 2 values"),
    ({"communication_data_type": "int8"}, "'fp32', 'fp16', 'bf16'"),
    ({"gradient_predivide_factor": 0}, "at least 1.17"),
    ({"gradient_clipping": float("nan")}, "a finite number"),
    ({"fp16.loss_scale": -1}, "range of fp32"),
    ({"fp16.initial_scale_power": 200}, "from 0 to 127"),
    ({"scheduler.params.warmup_num_steps": 1}, "scheduler.type ... which scheduler"),
    ({".offload_param.device": "disk"}, "'nvme'"),
    ({".offload_param.nvme_path": ""}, "of a folder"),
    ({"csv_monitor.enabled": True, "csv_monitor.output_path": 3}, "expected"),
    # Contradictions.
    ({"bf16.enabled": True, "fp16.enabled": True}, "bf16.enabled"),
    ({"bf16.enabled": True, "fp16.loss_scale": 128}, "bf16.enabled"),
    (
        {"fp16.enabled": True, "fp16.initial_scale_power": 2, "fp16.min_loss_scale": 8},
        "fp16.initial_scale_power",
    ),
    ({"fp16.enabled": True, "data_types.param_dtype": "bf16"}, "torch.float16"),
    ({"data_types.param_dtype": "bf16"}, "torch.float32"),
    ({"bf16.enabled": True, "data_types.grad_accum_dtype": "bf16"}, "torch.float32"),
    (
        {"bf16.enabled": True, "bf16.bf16_optimizer_states": True},
        "bf16.bf16_master_weights_and_grads",
    ),
    (
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
        "train_batch_size ... = 16, got 8",
    ),
    (
        {".stage": 3, ".offload_param.device": "nvme"},
        ".offload_param.nvme_path ... expected a folder",
    ),
    (
        {".stage": 1, ".offload_optimizer": {"device": "nvme", "nvme_path": None}},
        ".offload_optimizer.nvme_path ... expected a folder",
    ),
    (
        PARAMS_ON_DISK | {".offload_optimizer": {"device": "nvme", "nvme_path": "/other"}},
        ".offload_optimizer.nvme_path ... agrees with zero_optimization.offload_param.nvme_path",
    ),
    (
        {".stage": 2, ".offload_optimizer.device": "none", ".cpu_offload": True},
        "agrees with zero_optimization.offload_optimizer.device",
    ),
    (
        PARAMS_ON_DISK | {"aio.intra_op_parallelism": 2, "aio.thread_count": 4},
        "agrees with aio.intra_op_parallelism",
    ),
    ({"prescale_gradients": True, "gradient_predivide_factor": 4}, "with prescale_gradients"),
    (
        {".stage": 3, ".zero_hpz_partition_size": 4, ".mics_shard_size": 8},
        "zero_hpz_partition_size 4",
    ),
    # Where the second reduction of MiCS ends on every replica there is no error of one's own.
    (LOCO | {".mics_shard_size": 8, ".zeropp_loco_param": {}}, "mics_shard_size 8"),
    (LOCO | {".zeropp_loco_param": {"err_beta": 1.5}}, "err_beta in [0, 1)"),
    (LOCO | {".zeropp_loco_param": {"reset_T": 0}}, "reset_T of at least 1"),
    (LOCO | {".zeropp_loco_param": {"beta": 0.5}}, "got ['beta']"),
    # Features.
    (
        {".stage": 3, ".offload_optimizer.device": "cpu", ".offload_optimizer.super_offload": True},
        "expected false",
    ),
    (PARAMS_ON_DISK | {"aio.use_gds": True}, "GPUDirect"),
    ({".stage": 3, ".zenflow": {"topk_ratio": 0.1}}, "expected nothing"),
    ({"elasticity": {"enabled": True}}, "set the batch sizes"),
    ({"compile": {"deepcompile": True}}, "torch.compile"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("keys", "said"), WRONG)
def test_a_wrong_file_says_which_key_and_what_instead(nested, keys: Any, said: str) -> None:
    """A traceback from inside says nothing to who wrote the file."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_deepspeed({"train_batch_size": 8, **nested(keys)})

    message, (start, _, part) = str(caught.value), said.rpartition(" ... ")
    start = start or list(keys)[-1]
    assert message.startswith(f"{Z}{start}" if start.startswith(".") else start)
    assert part in message
    assert "expected" in message


def test_what_concerns_the_whole_file_is_said() -> None:
    """A plain loop's file is checked whole, too: what it would ignore in silence is asked for."""
    for name in ("fp16.enabled", 3):
        with pytest.raises(ConfigError, match=f"^{name}: .*nested objects"):
            EngineConfig.from_deepspeed({"train_batch_size": 8, name: True})
    with pytest.raises(ConfigError, match=r"^train_batch_size: .*train_micro_batch_size_per_gpu"):
        EngineConfig.from_deepspeed({"gradient_accumulation_steps": 2})
    with pytest.raises(ConfigError, match=r"^elasticity: "):
        ZeroConfig.from_deepspeed({"elasticity": {"enabled": True}})
    for source in (None, 3, b"{}", [("stage", 1)]):
        with pytest.raises(ConfigError, match="expected a dict, the path"):
            EngineConfig.from_deepspeed(source)  # type: ignore[arg-type]
    for world_size in (0, True, 2.0, None):
        with pytest.raises(ConfigError, match="world_size"):
            EngineConfig.from_deepspeed({"train_batch_size": 8}, world_size=world_size)  # type: ignore[arg-type]


def _keys_of(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in section.items():
        yield prefix, name
        if isinstance(value, dict):
            yield from _keys_of(value, f"{prefix}{name}.")


def test_a_slip_of_the_pen_is_met_in_its_own_section() -> None:
    """Similar names are in sections that have nothing to do with each other."""
    checked = 0
    for prefix, name in _keys_of({name: DOCUMENTED[name] for name in (Z, "fp16", "aio", "bf16")}):
        for slip in (name.upper(), name[: len(name) // 2] + name[len(name) // 2 + 1 :]):
            raw: Any = {slip: 1}
            for part in reversed(prefix.split(".")[:-1]):
                raw = {part: raw}
            with pytest.raises(ConfigError, match=r"unknown; .*; did you mean ") as caught:
                EngineConfig.from_deepspeed({"train_batch_size": 8, **raw})
            mean = str(caught.value).partition("did you mean ")[2].removesuffix("?")
            assert mean.startswith(prefix) and "." not in mean.removeprefix(prefix), raw
            checked += 1
    assert checked > 100


def test_an_error_of_a_key_says_in_which_file_it_is(tmp_path: Path) -> None:
    """A job may read several; the key's path stays first."""
    file = tmp_path / "ds.json"
    for raw in ({Z: {"stge": 2}}, {"train_batch_size": "two"}, {"optimizer": {"type": "AdamX"}}):
        file.write_text(json.dumps({"train_batch_size": 8, **raw}))
        with pytest.raises(ConfigError) as caught:
            EngineConfig.from_deepspeed(file)
        assert caught.value.__notes__ == [f"in the configuration {str(file)!r}"]


TEXTS: Final[dict[str, tuple[type[Exception], str, str]]] = {  # of a file, and as base64
    "{": (FileError, "ds.json.*expected JSON", "base64 'ew==': expected JSON"),
    "[1]": (
        FileError,
        "ds.json.*expected an object",
        "'WzFd': expected a JSON file, which cannot be read",
    ),
    '{"a": \xff}': (FileError, "ds.json.*expected JSON", "base64 .*: expected JSON"),
    '{"fp16": {"enabled": true, "enabled": false}}': (
        ConfigError,
        *2 * (r"^fp16\.enabled: expected one value",),
    ),
}


def test_what_is_no_json_object_is_said_with_where_it_came_from(tmp_path: Path) -> None:
    """Readers keep the last of two values; and what a launcher encoded nobody has seen."""
    for text, (error, of_file, of_base64) in TEXTS.items():
        path, content = tmp_path / "ds.json", text.encode("latin-1")
        path.write_bytes(content)
        with pytest.raises(error, match=of_file):
            EngineConfig.from_deepspeed(path)
        with pytest.raises(error, match=of_base64):
            EngineConfig.from_deepspeed(base64.b64encode(content).decode())
    with pytest.raises(FileError, match=r"none\.json.*No such file"):
        ZeroConfig.from_deepspeed(str(tmp_path / "none.json"))


VALUES: Final = (
    *(None, True, False, 0, 1, 2, 3, -1, 1.5, 1e9, float("inf"), float("nan")),
    *(10**400, 10**5000, "", "auto"),
    *("none", "cpu", "fp16", "bf16", "adam", "WarmupLR", [], [1], ["a"], [[]], {}, {"a": 1}),
    *({"enabled": True}, {"enabled": "auto"}, {1: 2}, object(), ("x",), b"x", 10**5000),
)


def _mutate(raw: dict[Any, Any], rng: random.Random, rate: float, path: str = "") -> set[str]:
    """Change a nested dict at a few places; returns the paths that it changed."""
    changed = set()
    for name in list(raw):
        where = f"{path}{name}"
        if isinstance(raw[name], dict) and rng.random() < 0.8:
            changed |= _mutate(raw[name], rng, rate, f"{where}.")
        elif rng.random() < rate:
            raw[name] = rng.choice(VALUES)
            changed.add(where)
        elif rng.random() < 0.5:
            del raw[name]
    if rng.random() < rate / 2:
        name = rng.choice(["stag", "", "enabled", 7, None, "zero_optimization", "a.b", "auto"])
        raw[name] = rng.choice(VALUES)
        changed.add(f"{path}{name}")
    return changed


def test_any_dictionary_is_read_or_refused_by_the_path_of_a_key() -> None:
    """Whatever people write, they get an answer about their file and never about our code."""
    documented = {prefix + name for prefix, name in _keys_of(DOCUMENTED)}
    refused = 0
    for seed in range(500):
        rng = random.Random(seed)
        raw = json.loads(json.dumps(DOCUMENTED))
        changed = _mutate(raw, rng, rate=rng.choice([0.005, 0.01, 0.05]))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                config = EngineConfig.from_deepspeed(raw, world_size=rng.choice([1, 2, 3]))
            except ConfigError as error:
                path, refused = str(error).split(": ")[0], refused + 1
                assert path in changed | documented or any(
                    path.startswith(f"{other}.") for other in changed
                ), seed
            else:
                assert config.table()
    assert 100 < refused < 500
