"""The loss scale, step by step."""

import math

import numpy as np
import pytest
from zero_engine import ConfigError, LossScaleError
from zero_engine.engine import DynamicLossScale, LossScaler, StaticLossScale


def _expected_scales(overflows: list[bool], value: DynamicLossScale) -> list[float]:
    """From the description, looking back over the whole history at every step; keeps no counter.

    Since the last time that hysteresis was full, overflows are counted. It is full at the start,
    whenever the scale doubles and, if consecutive, after each step without overflow.
    """
    power, full_since, clean_since, scales = value.initial_power, 0, 0, []
    for step, overflowed in enumerate(overflows):
        if overflowed:
            spent = sum(overflows[full_since : step + 1])
            if spent >= value.hysteresis and 2.0 ** (power - 1) >= value.minimum:
                power -= 1
            clean_since = step + 1
        else:
            if value.consecutive_hysteresis:
                full_since = step + 1
            clean_before = step - clean_since
            if clean_before > 0 and clean_before % value.window == 0:
                power, full_since = min(power + 1, 127), step + 1
        scales.append(2.0**power)
    return scales


def _random_case(seed: int) -> tuple[DynamicLossScale, list[bool]]:
    rng = np.random.default_rng(seed)
    value = DynamicLossScale(
        initial_power=int(rng.integers(3, 17)),
        window=int(rng.integers(1, 9)),
        hysteresis=int(rng.integers(1, 5)),
        consecutive_hysteresis=bool(rng.integers(2)),
        minimum=2.0 ** int(rng.integers(-3, 4)),
    )
    overflows = rng.random(200) < rng.choice([0.02, 0.2, 0.5, 0.9])
    return value, overflows.tolist()


def test_the_scale_follows_its_description_over_a_resumption() -> None:
    """A scale that falls too early wastes precision, one that falls too late wastes steps."""
    for seed in range(100):
        value, overflows = _random_case(seed)
        scaler, scales = LossScaler(value), []
        for step, overflowed in enumerate(overflows):
            if step == seed:  # resumed from its state
                state, scaler = scaler.state_dict(), LossScaler(value)
                scaler.load_state_dict(state)
            scaler.update(overflowed)
            scales.append(scaler.scale)

        assert scales == _expected_scales(overflows, value), seed


def test_the_scale_is_a_power_of_two_of_fp32_and_not_below_the_minimum() -> None:
    """Only then does unscaling round nothing; and a loss times inf is no loss."""
    rng = np.random.default_rng(0)
    for minimum in (0.0, 0.3, 7.0):
        scaler = LossScaler(DynamicLossScale(initial_power=3, window=3, minimum=minimum))
        for overflowed in rng.random(1000) < 0.6:
            scaler.update(bool(overflowed))
            assert math.frexp(scaler.scale)[0] == 0.5
            assert scaler.scale >= minimum
    for overflowed in (False, True):
        scaler = LossScaler(DynamicLossScale(window=1, hysteresis=1, minimum=0.0))
        for _ in range(400):
            scaler.update(overflowed)
        assert np.isfinite(np.float32(scaler.scale)) and np.float32(1 / scaler.scale) > 0


def test_counters_from_other_settings_go_on_under_the_new_ones() -> None:
    """A count that a smaller window can no longer meet would never let the scale double again."""
    old = LossScaler(DynamicLossScale(window=100, hysteresis=5))
    for _ in range(50):
        old.update(False)
    new = LossScaler(DynamicLossScale(window=10, hysteresis=2))
    new.load_state_dict(old.state_dict())

    assert new.state_dict()["hysteresis"] == 2
    new.update(False)
    assert new.scale == 2 * old.scale


def test_an_overflow_at_the_minimum_is_an_error_where_asked() -> None:
    """A run that skips every step from here on looks alive and learns nothing."""
    kept = LossScaler(DynamicLossScale(initial_power=1, hysteresis=1))
    asked = LossScaler(DynamicLossScale(initial_power=1, hysteresis=1, raises_at_minimum=True))
    for scaler in (kept, asked):
        scaler.update(True)
    kept.update(True)
    before = asked.state_dict()

    assert kept.scale == 1.0
    with pytest.raises(LossScaleError, match=r"overflow at loss scale 1, .*minimum 1\).*bf16"):
        asked.update(True)
    assert asked.state_dict() == before


def test_a_static_scale_never_changes() -> None:
    """It is configuration: neither overflows nor what another run had saved touch it."""
    scaler, other = LossScaler(StaticLossScale(128)), LossScaler(DynamicLossScale())
    scaler.update(True)
    scaler.load_state_dict(other.state_dict())

    assert scaler.scale == 128.0
    assert scaler.state_dict() == {"scale": 128.0}


def test_a_bad_setting_is_refused_by_name() -> None:
    """By its name, and with what was expected, whoever has written it."""
    for name, values in {
        "initial_power": (True, -1, 0.5, 128, "16", None),
        "window": (False, 0, math.nan),
        "hysteresis": (True, 0, math.inf),
        "minimum": (True, -1.0, math.inf, 2.0**17),
        "consecutive_hysteresis": (1, None),
        "raises_at_minimum": (0, "no"),
    }.items():
        for bad in values:
            with pytest.raises(ConfigError, match=rf"DynamicLossScale\.{name}: expected .*, got"):
                DynamicLossScale(**{name: bad})
    for bad in (True, 0, math.inf, "auto", None, 1e-40, 1e39):
        with pytest.raises(ConfigError, match=r"StaticLossScale\.scale: expected .*, got"):
            StaticLossScale(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a StaticLossScale or a DynamicLossScale"):
        LossScaler(65536.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"scale": -2.0, "clean_steps": 3, "hysteresis": 1}, "scale: expected"),
        ({"scale": 2.0, "clean_steps": 3, "hysteresis": 0}, "hysteresis: expected"),
        ({"scale": 2.0, "clean_steps": 1.5, "hysteresis": 1}, "clean_steps: expected"),
        ({"scale": 128.0}, r"'clean_steps'.*got \['scale'\].*load nothing"),  # of a static one
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state: dict, match: str) -> None:
    """Half a state loaded is a run that cannot be repeated."""
    scaler = LossScaler(DynamicLossScale())
    before = scaler.state_dict()

    with pytest.raises(ConfigError, match=match):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before
