"""DeepSpeed's files from paths; `ranks` comes with zero-comm."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest


@pytest.fixture(scope="session")
def nested() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """`nested({".stage": 3, "fp16.enabled": True})` is DeepSpeed's file of these paths.

    What begins with a dot is of zero_optimization.
    """

    def nest(values: Mapping[str, Any]) -> dict[str, Any]:
        file: dict[str, Any] = {}
        for path, value in values.items():
            *sections, name = (f"zero_optimization{path}" if path[:1] == "." else path).split(".")
            place = file
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        return file

    return nest
