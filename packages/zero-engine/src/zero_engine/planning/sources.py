"""Models without memory to plan with, from a configuration or from sizes; and their optimizers."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import torch
from attrs import field, frozen
from torch import nn

from zero_engine.checks import at_least
from zero_engine.errors import ConfigError, FileError
from zero_engine.readers import find_reader

# Characters of another library's error to quote: some list every known class.
LONGEST: Final = 300

_OPTIMIZERS: Final = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adafactor")

# A class of optimizers, or a function that builds one from parameters.
OptimizerMaker: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@final
@frozen
class GPTSize:
    """A transformer by its numbers: 12 x layers x hidden^2 parameters, and embeddings if any.

    Args:
        layers: Blocks of 12 x hidden^2 parameters each.
        hidden: Width.
        params: Number of all parameters; those in no block are the model's own, as embeddings are.
            The number in the blocks when None.
        dtype: Dtype of the parameters.

    Raises:
        ConfigError: Names the number, what was expected and what came.
    """

    layers: int = field(validator=at_least(1, int))
    hidden: int = field(validator=at_least(1, int))
    params: int | None = field(default=None, validator=at_least(1, int))
    dtype: torch.dtype = field(default=torch.float32)

    def __attrs_post_init__(self) -> None:
        if self.embedding_numel < 0:
            raise ConfigError(
                f"GPTSize.params: expected at least the {self.blocks_numel:,} parameters of "
                f"{self.layers} layers of width {self.hidden}, got {self.params:,}; lower layers "
                "or hidden, or leave params out"
            )

    @property
    def blocks_numel(self) -> int:
        """Parameters of all blocks."""
        return 12 * self.layers * self.hidden**2

    @property
    def embedding_numel(self) -> int:
        """Parameters that are in no block."""
        return 0 if self.params is None else self.params - self.blocks_numel

    def build(self) -> nn.Module:
        """Build the model, on meta."""
        h, model = self.hidden, nn.Sequential()
        if self.embedding_numel:
            embedding = torch.empty(self.embedding_numel, dtype=self.dtype, device="meta")
            model.register_parameter("embeddings", nn.Parameter(embedding))
        blocks = [
            nn.Sequential(
                *(
                    nn.Linear(rows, columns, bias=False, dtype=self.dtype, device="meta")
                    for rows, columns in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h))
                )
            )
            for _ in range(self.layers)
        ]
        model.add_module("blocks", nn.Sequential(*blocks))
        return model


def model_of(source: Any) -> nn.Module:
    """Return the model to plan with: `source` itself, or a new one on meta; see `plan`. Local."""
    if isinstance(source, nn.Module):
        return source
    if isinstance(source, GPTSize):
        return source.build()
    if isinstance(source, str | Path):
        source = read_config(Path(source))
    if isinstance(source, Mapping) or hasattr(source, "model_type"):
        return hugging_face_model(source)
    raise ConfigError(
        "plan(): expected a torch module, a GPTSize, or a configuration of transformers (object, "
        f"dict, config.json or its folder), got {source!r} of type {type(source).__name__}"
    )


def optimizer_of(
    choice: str | OptimizerMaker | torch.optim.Optimizer | None, model: nn.Module
) -> torch.optim.Optimizer | None:
    """Return an optimizer of the model's trainable parameters; None if `choice` is None."""
    if choice is None or isinstance(choice, torch.optim.Optimizer):
        return choice
    if isinstance(choice, str):
        return _optimizer_by_name(choice, model)
    if callable(choice):
        made = choice(param for param in model.parameters() if param.requires_grad)
        if isinstance(made, torch.optim.Optimizer):
            return made
    raise ConfigError(
        "plan(): expected optimizer to be a name such as 'adamw', a torch optimizer, what makes "
        f"one of parameters, or None, got {choice!r}"
    )


def _optimizer_by_name(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Build an optimizer of torch.optim, in upper or lower case, or one that a reader knows."""
    params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    of_torch = {kind.lower(): getattr(torch.optim, kind) for kind in _OPTIMIZERS}
    if not params:
        raise ConfigError("plan(): expected a parameter that requires a gradient, got none")
    if name.lower() in of_torch:
        made: torch.optim.Optimizer = of_torch[name.lower()](params, lr=1e-3)
        return made
    if (reader := find_reader()) is not None:
        return reader.make_optimizer(params, name, {"lr": 1e-3})
    raise ConfigError(
        f"plan(): expected one of {', '.join(of_torch)}, or another by zero-deepspeed, which is "
        f"not installed, got optimizer={name!r}; pass what makes it of parameters"
    )


def read_json(path: Path, expected: str = "") -> Any:
    """Return the content of a JSON file. Raises FileError."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}){expected}") from error
    except ValueError as error:
        raise FileError(f"{path}: expected JSON, got something else: {error}") from error


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the content of a config.json of transformers, or of the folder with it.

    Raises:
        FileError: There is none, or it is something else.
    """
    path = path / "config.json" if path.is_dir() else path
    expected = "; expected a config.json of transformers, or a folder with one"
    if re.fullmatch(r"\d+(\.\d+)?[KMBT]", path.name, re.IGNORECASE):
        expected += f"; for a number of parameters, --params {path.name}"
    found = read_json(path, expected)
    if not isinstance(found, Mapping) or "model_type" not in found:
        raise FileError(
            f"{path}: expected a configuration of transformers, with model_type; got the keys "
            f"{sorted(found) if isinstance(found, Mapping) else type(found).__name__}"
        )
    return found


def hugging_face_model(config: Any, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a new model on meta of a configuration of transformers: an object or a dict. Local.

    Args:
        config: The configuration.
        dtype: Dtype of the parameters; the configuration's when None.

    Raises:
        ConfigError: transformers is missing, or builds no model of it.
    """
    try:
        import transformers  # noqa: PLC0415  # no dependency of ours
    except ImportError as error:
        raise ConfigError(
            "plan(): a configuration of transformers needs that package to be built: pip install "
            "transformers, or pass a model on meta, or GPTSize(layers, hidden)"
        ) from error
    try:
        if isinstance(config, Mapping):
            given = {key: value for key, value in config.items() if key != "model_type"}
            config = transformers.AutoConfig.for_model(config["model_type"], **given)
        if dtype is not None:
            config = copy.deepcopy(config)
            config.dtype = dtype
        names = getattr(config, "architectures", None) or ()
        classes = (getattr(transformers, name, None) for name in names)
        kind = next((found for found in classes if found is not None), None)
        with torch.device("meta"):
            if kind is not None:
                return kind._from_config(config)  # type: ignore[no-any-return]
            return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]
    # The model's code may raise anything.
    except Exception as error:
        text = re.sub(r"\s+", " ", str(error))
        raise ConfigError(
            f"plan(): transformers {transformers.__version__} builds no model of this "
            f"configuration: {type(error).__name__}: {text[:LONGEST]}"
        ) from error
