"""How fast a machine is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import attrs
from attrs import Attribute, field, frozen

from ._errors import ConfigError, FileError


def _is_rate(_: Any, attribute: Attribute, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None and attribute.default is None:
        return
    if not is_number or not 0 < value < float("inf"):
        raise ConfigError(f"Rates.{attribute.name}: expected a number above 0, got {value!r}")


@final
@frozen(kw_only=True)
class Rates:
    """What one rank does in a second, and how long it takes over what is smallest, all at work.

    None: not measured, or there is none.

    Args:
        matmul_flops: Of matrix products, a multiplication and an addition each.
        device_bytes: Read and written of the memory of the device.
        host_bytes: Likewise of the host; the device's when None.
        transfer_bytes: Between device and host; where the device is the CPU there is no such.
        send_bytes: To ranks of the same node.
        send_across_bytes: To ranks of other nodes; as to the same when None.
        disk_read_bytes: From disk.
        disk_write_bytes: To disk.
        layer_s: Seconds for a forward and backward of a layer too small for its arithmetic to
            count; no time when None.
        launch_s: Seconds for a collective too small for its bytes to count; no time when None.

    Raises:
        ConfigError: Names the rate, what was expected and what came.
    """

    matmul_flops: float = field(validator=_is_rate)
    device_bytes: float = field(validator=_is_rate)
    host_bytes: float | None = field(default=None, validator=_is_rate)
    transfer_bytes: float | None = field(default=None, validator=_is_rate)
    send_bytes: float | None = field(default=None, validator=_is_rate)
    send_across_bytes: float | None = field(default=None, validator=_is_rate)
    disk_read_bytes: float | None = field(default=None, validator=_is_rate)
    disk_write_bytes: float | None = field(default=None, validator=_is_rate)
    layer_s: float | None = field(default=None, validator=_is_rate)
    launch_s: float | None = field(default=None, validator=_is_rate)

    @classmethod
    def load(cls, path: str | Path) -> Rates:
        """From what `save`, or `zero probe --json`, wrote.

        Raises:
            FileError: There is no such file, or it is no JSON of rates.
            ConfigError: A rate is no number.
        """
        try:
            found = json.loads(Path(path).read_text())
        except OSError as error:
            raise FileError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise FileError(f"{path}: expected JSON, got something else: {error}") from error
        names = [each.name for each in attrs.fields(cls)]
        if not isinstance(found, Mapping) or not {"matmul_flops", "device_bytes"} <= set(found):
            raise FileError(
                f"{path}: expected the rates that `zero probe --json` prints, matmul_flops and "
                "device_bytes at least"
            )
        if unknown := sorted(set(found) - set(names)):
            raise FileError(f"{path}: expected rates among {', '.join(names)}, got {unknown}")
        return cls(**found)
