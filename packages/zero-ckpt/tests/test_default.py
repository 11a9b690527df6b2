"""The functions of the default Checkpointer, and how they configure it."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from same_numbers import Run, Stack, assert_equal, plainly, slope, train
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import noop_context_fn
from zero_ckpt import (
    Checkpointer,
    CheckpointError,
    CheckpointFunction,
    KeepSaver,
    SeedInUseError,
    UnknownRngError,
    checkpoint,
    configure,
    default_checkpointer,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
    non_reentrant_checkpoint,
    reset,
    set_num_layers,
)
from zero_ckpt.testing import choices_of, fresh_default
from zero_comm import Group
from zero_comm.testing import equal


@pytest.fixture(autouse=True)
def default() -> Iterator[Checkpointer]:
    """A new one for each test."""
    with fresh_default() as checkpointer:
        yield checkpointer


def _as_megatron(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return CheckpointFunction.apply(function, False, *args, **kwargs)


def _as_deepspeed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    outputs: list[Any] = []
    CheckpointFunction.apply(function, outputs, *args, **kwargs)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def test_every_name_recomputes_with_the_rngs_of_the_default_tracker() -> None:
    """A model takes its tracker from one function and its checkpoint from another."""
    tracker = get_cuda_rng_tracker()

    def numbers(run: Run) -> list[Tensor]:
        return train(run, lambda: Stack(tracker=tracker), tracker=tracker)

    expected = numbers(plainly)
    for run in (checkpoint, non_reentrant_checkpoint, _as_megatron, _as_deepspeed):
        assert_equal(numbers(run), expected, run)


NAMES = pytest.mark.parametrize("run", [checkpoint, non_reentrant_checkpoint])


@NAMES
def test_what_torch_calls_checkpoint_with_does_not_reach_the_function(run: Run) -> None:
    """transformers, timm and torchvision give these; a layer that takes any keyword computes on."""
    seen: list[dict[str, Any]] = []

    def layer(x: Tensor, **options: Any) -> Tensor:
        seen.append(options)
        return torch.dropout(x, 0.5, train=True).sin() * options["scale"]

    x = torch.ones(64, requires_grad=True)
    for options in (
        {"use_reentrant": True, "preserve_rng_state": False},
        {
            "use_reentrant": False,
            "preserve_rng_state": True,
            "determinism_check": "default",
            "context_fn": noop_context_fn,
            "debug": False,
            "early_stop": True,
        },
    ):
        seen.clear()
        torch.manual_seed(0)
        found = slope(partial(run, layer, **options, scale=2), x)
        torch.manual_seed(0)
        assert equal(found, slope(partial(layer, scale=2), x))
        with torch.no_grad():  # where nothing is kept, the call is the same
            run(layer, x, **options, scale=2)

        assert seen == [{"scale": 2}] * 4


@NAMES
def test_a_bool_that_megatron_or_the_function_may_mean_is_refused(run: Run) -> None:
    """Taken for either, the other's script would compute on with a wrong argument."""

    def layer(*args: Any, causal: bool | None = None) -> Tensor:
        return args[-1].sin()

    x = torch.ones(2, requires_grad=True)
    remedy = r"distribute_saved_activations.*CheckpointFunction\.apply.*partial"

    for flag in (True, False):
        with pytest.raises(CheckpointError, match=remedy):
            run(layer, flag, x)
        for own in (partial(layer, flag), partial(layer, causal=flag)):
            assert equal(run(own, x), x.sin())


def test_the_list_gets_every_output_in_order() -> None:
    """DeepSpeed's callers read outputs off it, those that are no tensors too."""
    x = torch.ones(2, requires_grad=True)
    outputs: list[Any] = ["before"]

    CheckpointFunction.apply(lambda x: (x + 1, None, "text", x.sin()), outputs, x)
    outputs[-1].sum().backward()

    assert outputs[2:4] == [None, "text"]
    assert equal(outputs[1], x + 1)
    assert equal(x.grad, x.cos())


def test_a_model_that_holds_the_functions_can_be_copied_and_pickled() -> None:
    """An average of weights copies the model; transformers puts a partial of `checkpoint` in it."""
    held = [partial(checkpoint), partial(get_cuda_rng_tracker), partial(CheckpointFunction.apply)]

    for copied in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert [one.func for one in copied] == [one.func for one in held]


# Seeds.


def _mpu(axis: str, rank: int, group: Any = None) -> Any:
    facts = {"rank": rank, "world_size": 4, "group": group}
    return SimpleNamespace(
        **{f"get_{axis}_{name}": lambda fact=fact: fact for name, fact in facts.items()}
    )


def _numbers_of(seed: int) -> Tensor:
    device = get_cuda_rng_tracker().device
    return torch.rand(3, device=device, generator=torch.Generator(device).manual_seed(seed))


def _drawn() -> Tensor:
    return torch.rand(3, device=get_cuda_rng_tracker().device)


def _drawn_in_fork() -> Tensor:
    with get_cuda_rng_tracker().fork():
        return _drawn()


AXES = ("tensor_model_parallel", "slice_parallel", "model_parallel")
MPUS = {  # and this rank's number among those that split layers
    **{axis: (_mpu(axis, 3), 3) for axis in AXES},
    # Megatron's model-parallel group has the pipeline's stages in it, its tensor-parallel not.
    "both": (SimpleNamespace(**(vars(_mpu(AXES[0], 1)) | vars(_mpu(AXES[2], 3)))), 1),
    "none": (None, 0),
}


@pytest.mark.parametrize(("mpu", "rank"), MPUS.values(), ids=MPUS)
def test_ranks_share_the_default_seed_and_have_one_each_besides(mpu: Any, rank: int) -> None:
    """Where they hold the same activation they must drop the same, where parts of one, not."""
    configure(mpu)

    for _ in range(2):  # as Megatron's does, which resets the tracker: a seed may come twice
        model_parallel_cuda_manual_seed(1000)
        assert equal(_drawn(), _numbers_of(1000))
        assert equal(_drawn_in_fork(), _numbers_of(1000 + 2718 + rank))


def test_the_model_parallel_rng_is_seeded_anew_alone() -> None:
    """Layers that are split get new masks; the default rng goes on."""
    configure(_mpu("model_parallel", 2))
    with pytest.raises(UnknownRngError, match="call model_parallel_cuda_manual_seed"):
        model_parallel_reconfigure_tp_seed(2000)
    model_parallel_cuda_manual_seed(1000)
    expected = torch.random.get_rng_state()

    model_parallel_reconfigure_tp_seed(2000)

    assert equal(torch.random.get_rng_state(), expected)
    assert equal(_drawn_in_fork(), _numbers_of(2000 + 2718 + 2))


def test_a_seed_that_is_refused_changes_nothing() -> None:
    """2**64 - 1 is one itself, but not with an offset; two rngs of one seed give equal masks."""
    model_parallel_cuda_manual_seed(1000)
    get_cuda_rng_tracker().add("another", 2000 + 2718)

    with pytest.raises(SeedInUseError, match="rng 'another'"):
        model_parallel_reconfigure_tp_seed(2000)
    for seed in ("1", 1.5, None, True, 2**64 - 1):
        for call in (model_parallel_cuda_manual_seed, model_parallel_reconfigure_tp_seed):
            with pytest.raises(CheckpointError, match=f"{call.__name__}.*expected an int"):
                call(seed)

    assert equal(_drawn(), _numbers_of(1000))
    assert equal(_drawn_in_fork(), _numbers_of(1000 + 2718))


# What configure is told.

KEYS = {  # of the file, by argument, in DeepSpeed's order
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}
DEFAULTS = dict.fromkeys(KEYS, False) | {"num_checkpoints": None}


def _section(**keys: Any) -> dict[str, Any]:
    return {"activation_checkpointing": keys, "train_batch_size": 8}


def test_configure_takes_its_arguments_in_deepspeeds_order() -> None:
    """Some code gives them by position."""
    assert list(inspect.signature(configure).parameters) == ["mpu_", "deepspeed_config", *KEYS]


@pytest.mark.parametrize("argument", KEYS)
def test_an_argument_beats_the_file_which_beats_the_default(argument: str) -> None:
    """A script's flags correct the file that it is started with."""
    values, unset = ((3, 5), 9) if argument == "num_checkpoints" else ((False, True), False)

    for given, written in itertools.product((None, *values), repeat=2):
        checkpointer = Checkpointer()
        checkpointer.set_num_layers(9)
        source = _section(**{KEYS[argument]: written})
        checkpointer.configure(None, deepspeed_config=source, **{argument: given})

        expected = next((one for one in (given, written) if one is not None), unset)
        assert choices_of(checkpointer)[argument] == expected, (given, written)


SECTION = {"synchronize_checkpoint_boundary": True, "number_checkpoints": 4}


def test_the_file_comes_in_every_form_that_scripts_have_it_in(
    tmp_path: Path, default: Checkpointer
) -> None:
    """Some pass args.deepspeed_config, a path; some the dict; some what was parsed from it.

    As DeepSpeed's, each starts from the defaults: what one model asked for the next does not.
    """
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_section(**SECTION)))
    parsed = SimpleNamespace(
        **SECTION, profile=False, partition_activations=False, cpu_checkpointing=False
    )
    forms: list[Any] = [
        _section(**SECTION),
        path,
        str(path),
        SimpleNamespace(activation_checkpointing_config=SECTION),
        SimpleNamespace(activation_checkpointing_config=parsed),  # DeepSpeed's object
    ]

    for form in forms:
        configure(None, deepspeed_config=form)
        assert choices_of(default) == DEFAULTS | {"synchronize": True, "num_checkpoints": 4}, form
        for nothing in (None, {}, {"activation_checkpointing": None}):  # as most files ask for
            configure(None, profile=True)
            configure(None, deepspeed_config=nothing)
            assert choices_of(default) == DEFAULTS | {"num_checkpoints": 4}


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"deepspeed_config": _section(partition=True)},
        r"activation_checkpointing\.partition: expected one of partition_activations, ",
    ),
    (
        {"deepspeed_config": _section(cpu_checkpointing="true")},
        r"activation_checkpointing\.cpu_checkpointing: expected True or False, got 'true'",
    ),
    (  # though an argument beats it
        {"deepspeed_config": _section(profile=1), "profile": True},
        r"activation_checkpointing\.profile: expected True or False, got 1",
    ),
    (
        {"deepspeed_config": {"activation_checkpointing": 3}},
        "expected 'activation_checkpointing' to be a section",
    ),
    ({"deepspeed_config": "/no/such.json"}, "path of a JSON file, got '/no/such.json'"),
    ({"deepspeed_config": 3}, "expected a dict, the path of a JSON file"),
    ({"partition_activations": 1}, r"configure\(partition_activations=\): expected True or False"),
    ({"num_checkpoints": 0}, r"configure\(num_checkpoints=\): expected an int of 1"),
    ({"num_checkpoints": True}, "expected an int of 1 or more, got True"),
    (
        {"contiguous_checkpointing": True},
        r"number of checkpointed layers, got none; give configure\(num_checkpoints=\)",
    ),
    ({"mpu_": object()}, "expected None, a DeviceMesh of one dimension or an object"),
    ({"mpu_": SimpleNamespace(get_model_parallel_rank=int)}, "each of rank, world_size and group"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    arguments: dict[str, Any], message: str, default: Checkpointer
) -> None:
    """DeepSpeed's takes most of these, and falls back to the defaults in silence."""
    before, saver = choices_of(default), default.saver

    with pytest.raises(CheckpointError, match=message):
        configure(**{"mpu_": None, **arguments})

    assert choices_of(default) == before
    assert default.saver is saver
    assert not is_configured()


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_a_file_that_is_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    """The path may be that of another file."""
    path = tmp_path / "config.json"
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"config\.json"):
        configure(None, deepspeed_config=path)


# What configure does.


def test_two_checkpointers_differ(default: Checkpointer) -> None:
    """Two models in one process have each their own: there is no other state."""
    saver = KeepSaver()
    other = Checkpointer(saver=saver)
    other.set_num_layers(3)
    assert other.saver is saver  # the number concerns only those that configure makes

    other.configure(_mpu("model_parallel", 1), profile=True)
    other.model_parallel_cuda_manual_seed(5)

    assert other.is_configured()
    assert other.saver is not saver
    assert choices_of(other) == DEFAULTS | {"profile": True, "num_checkpoints": 3}
    assert not is_configured()
    assert choices_of(default) == DEFAULTS
    assert not get_cuda_rng_tracker().is_initialized()


CONTIGUOUS = {"contiguous_checkpointing": True}
CONFIGURED = {  # options, and the number of layers that is said before, and after
    "split over nobody": ({"partition_activations": True}, None, None),
    # DeepSpeed wants partitioning for these too; no buffer needs it.
    "on the host": ({**CONTIGUOUS, "num_checkpoints": 3, "checkpoint_in_cpu": True}, None, None),
    "announced": (CONTIGUOUS, 3, None),
    "grown": ({**CONTIGUOUS, "num_checkpoints": 1}, None, 3),
}


@pytest.mark.parametrize(("options", "before", "after"), CONFIGURED.values(), ids=CONFIGURED)
def test_numbers_are_those_without_however_it_is_configured(
    options: dict[str, Any], before: int | None, after: int | None, default: Checkpointer
) -> None:
    """Files that ask for partitioning are used without model parallelism too."""
    if before is not None:
        set_num_layers(before)
    configure(None, **options)
    if after is not None:
        set_num_layers(after)
    assert isinstance(default.saver, KeepSaver) == ("partition_activations" in options)

    assert_equal(train(checkpoint, Stack), train(plainly, Stack))


def test_the_device_is_waited_for_at_both_edges_of_both_runs(monkeypatch) -> None:
    """So that a time that is measured there is that of the layer."""
    waits: list[str] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append("wait"))
    configure(None, synchronize=True)
    x = torch.ones(2, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        waits.append("run")
        return x.sin()

    checkpoint(function, x).sum().backward()

    assert waits == ["wait", "run", "wait"] * 2


def test_times_are_measured_when_that_is_configured() -> None:
    """And are found where the functions' own Checkpointer is."""
    configure(None, profile=True)
    x = torch.ones(2, requires_grad=True)

    checkpoint(torch.sin, x).sum().backward()

    (timing,) = default_checkpointer().timings()
    assert (timing.num_calls, timing.num_recomputations) == (1, 1)
    configure(None)
    with pytest.raises(CheckpointError, match=r"or configure\(profile=True\)"):
        default_checkpointer().timings()


def test_buffers_are_free_after_a_reset() -> None:
    """Evaluation that forgot no_grad() leaves graphs behind that nobody runs backward on."""
    configure(None, contiguous_checkpointing=True, num_checkpoints=2)
    x = torch.ones(4, requires_grad=True)
    left = [checkpoint(torch.sin, x) for _ in range(2)]

    reset()

    y = checkpoint(torch.sin, x)
    y.sum().backward()
    assert equal(x.grad, x.cos())
    left[0].sum().backward()
    assert equal(x.grad, 2 * x.cos())


def test_a_mesh_of_one_dimension_will_do_for_an_mpu(group: Group) -> None:
    """Code that came after Megatron has a DeviceMesh. Of two, nobody knows which splits layers."""
    checkpointer = Checkpointer()
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(CheckpointError, match=r"of one dimension, .* as in mesh\['tp'\]"):
        checkpointer.configure(mesh)

    checkpointer.configure(mesh["tp"])
    checkpointer.model_parallel_cuda_manual_seed(10)

    with checkpointer.tracker.fork():
        drawn = torch.rand(3, device=checkpointer.tracker.device)
    assert equal(drawn, _numbers_of(10 + 2718 + group.rank))


def test_a_group_that_is_not_the_mpus_is_refused(group: Group) -> None:
    """None is the default group for torch, which is every rank of the job."""
    for process_group, message in (
        (None, "as many ranks as its world size says, 4, got 2"),
        ("tp", "process group of torch.distributed, got 'tp'"),
    ):
        checkpointer = Checkpointer()
        with pytest.raises(CheckpointError, match=message):
            mpu = _mpu("model_parallel", group.rank, process_group)
            checkpointer.configure(mpu, partition_activations=True)
        assert not checkpointer.is_configured()
