"""Activations of a model of transformers, estimated from a forward that computes no values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from zero_engine.checks import check_number
from zero_engine.errors import ConfigError
from zero_engine.torch_private import fake_tensors, storage_id

from .sources import LONGEST, hugging_face_model, read_config

_INSTEAD: Final = "say what activations take by --activations-memory, Room(activations=...)"


def estimate_activations(
    config: Any, *, batch_size: int, sequence_length: int, dtype: torch.dtype | None = None
) -> int:
    """Return the bytes that autograd saves in a forward of one micro-batch, as an estimate. Local.

    The forward runs on tensors without memory, with the operators that torch takes on the CPU: its
    attention saves no matrix of scores, as fused attention does on a GPU. Counted is each tensor
    that is saved for backward, once, without parameters and buffers; the loss counts where the
    model takes labels. Not counted are temporaries of backward and of single operators, an
    autocast, and what activation checkpointing saves.

    Args:
        config: A configuration of transformers, as for `plan`.
        batch_size: Sequences of one rank in a micro-batch.
        sequence_length: Tokens of each.
        dtype: Dtype that the model computes in, such as `Precision.params`; the configuration's
            when None.

    Raises:
        ConfigError: No configuration of transformers, or of a model that cannot run without values,
            or that takes no tokens.
        FileError: There is no such file.
    """
    for name, number in (("batch_size", batch_size), ("sequence_length", sequence_length)):
        check_number(f"estimate_activations(): {name}", number, 1, int)
    if isinstance(config, str | Path):
        config = read_config(Path(config))
    if not (isinstance(config, Mapping) or hasattr(config, "model_type")):
        raise ConfigError(
            "estimate_activations(): expected a configuration of transformers (object, dict, "
            f"config.json or its folder), got {config!r}; {_INSTEAD}"
        )
    model = hugging_face_model(config, dtype=dtype).train()
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes:
        raise ConfigError(
            f"estimate_activations(): expected a model of tokens, with input_ids, got a "
            f"{type(model).__name__}; {_INSTEAD}"
        )
    with fake_tensors():
        model.to_empty(device="cpu")
        tokens = torch.zeros(batch_size, sequence_length, dtype=torch.long, device="cpu")
        given = {name: tokens for name in ("input_ids", "labels") if name in takes}
        # By id; a storage that is kept here keeps its id from coming twice.
        saved: dict[int, UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage_id(storage)] = storage
            return tensor

        try:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                model(**given)
        # The model's code may raise anything.
        except Exception as error:
            text = re.sub(r"\s+", " ", str(error))
            raise ConfigError(
                f"estimate_activations(): a {type(model).__name__} does not run without values: "
                f"{type(error).__name__}: {text[:LONGEST]}; {_INSTEAD}"
            ) from error
        kept = (*model.parameters(), *model.buffers())
        own = {storage_id(each.untyped_storage()) for each in kept}
    return sum(storage.nbytes() for key, storage in saved.items() if key not in own)
