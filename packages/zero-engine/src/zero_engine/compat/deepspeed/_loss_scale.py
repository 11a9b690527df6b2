"""The loss scale under the names that DeepSpeed's optimizers give it."""

from __future__ import annotations

from typing import Final, final

from attrs import frozen

from zero_engine import DynamicLossScale, Engine

_PLAIN: Final = "_zero_plain_class"


@final
@frozen(eq=False)
class LossScale:
    """The engine's loss scale, as it is when asked for; 1 where losses are not scaled."""

    _engine: Engine

    @property
    def cur_scale(self) -> float:
        """What losses are multiplied by now."""
        return self._engine.cur_scale

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether it changes."""
        return isinstance(self._engine.config.loss_scale, DynamicLossScale)


def hide_loss_scale(optimizer: object) -> None:
    """Undo `show_loss_scale`, so that an optimizer of another engine is known by its class."""
    plain = vars(type(optimizer)).get(_PLAIN)
    if plain is not None:
        optimizer.__class__ = plain


def show_loss_scale(engine: Engine) -> None:
    """Give the engine's optimizer, the same object, `loss_scaler`, `cur_scale` and `loss_scale`."""
    optimizer, scale = engine.optimizer, LossScale(engine)
    if optimizer is None:
        return
    # Properties need a class: a scale that was copied would be out of date after an overflow.
    kind = type(optimizer)
    names = {
        _PLAIN: kind,
        "__module__": kind.__module__,
        # A copy or a pickle is of the plain class: no engine steps it, and this one has no module.
        "__reduce_ex__": lambda self, _: (object.__new__, (kind,), self.__getstate__()),
        "loss_scaler": property(lambda _: scale),
        "cur_scale": property(lambda _: scale.cur_scale),
        "loss_scale": property(lambda _: scale.cur_scale),
    }
    optimizer.__class__ = type(kind.__name__, (kind,), names)
