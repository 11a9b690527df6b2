"""The compiled kernels, loaded once, or the reason why there are none. Nothing compiles here."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from attrs import evolve, field, frozen

from zero_offload.errors import NativeUnavailableError

from .library import ISAS, AbiError, open_cuda_library, open_library
from .recipe import CUDA_LIBRARY, LIBRARY, why_stale

HERE: Final = Path(__file__).parent
# Sources in a checkout, for editable installations; other installations do not have this folder.
CHECKOUT_SOURCES: Final = HERE.parents[2] / "csrc"
BUILD_HINT: Final = "`python -m zero_offload.build` compiles it"
SWITCHES: Final = ("auto", "require", "off")
_LOG: Final = logging.getLogger(__name__)


@frozen(eq=False)
class AdamKernels:
    """The library, and the instruction set that is called in it."""

    library: ctypes.CDLL
    isa: str

    @property
    def isas(self) -> list[str]:
        """Return the instruction sets that this processor and build have, the best last."""
        return [name for name, number in ISAS.items() if self.library.zero_has(number)]

    def with_isa(self, isa: str) -> AdamKernels:
        """Return the same library with another instruction set.

        Raises:
            NativeUnavailableError: This processor or build has none of that name.
        """
        if isa not in self.isas:
            raise NativeUnavailableError(
                f"no kernels for instruction set {isa!r} here; there are {', '.join(self.isas)}"
            )
        return AdamKernels(self.library, isa)


def _missing_cuda() -> str:
    path = HERE / CUDA_LIBRARY
    return "" if path.exists() else f"{path} does not exist: no nvcc when this was built"


@frozen
class NativeStatus:
    """Kernels that step tensors on the CPU, and the reasons why others do not.

    Attributes:
        isa: The instruction set in use: "avx512", "avx2", "vector" or "scalar"; empty without
            compiled kernels, when plain torch does the work.
        reason: Why there are no compiled kernels; empty if there are.
        others: The reason, for each instruction set that is not in use.
        cuda_reason: Why there is no library for FusedAdam; empty if there is.
        stale: Text that the library is older than its sources, with the remedy; empty if it is not.
    """

    isa: str
    reason: str = ""
    others: Mapping[str, str] = field(factory=dict)
    cuda_reason: str = field(factory=_missing_cuda)
    stale: str = ""

    @property
    def loaded(self) -> bool:
        """Return whether compiled kernels are in use."""
        return bool(self.isa)

    def __str__(self) -> str:
        lines = [f"CPU kernels: {self.isa or 'none, plain torch steps'}"]
        if self.reason:
            lines.append(f"  because {self.reason}")
        lines += [f"  {self.stale}"] if self.stale else []
        lines += [f"  {name}: not in use, {why}" for name, why in self.others.items()]
        built = "none" if self.cuda_reason else "built, for FusedAdam on CUDA devices"
        lines.append(f"CUDA kernels: {built}")
        lines += [f"  because {self.cuda_reason}"] if self.cuda_reason else []
        return "\n".join(lines)


def native_status() -> NativeStatus:
    """Return which kernels run and why others do not. Local; loads the library at the first call.

    Raises:
        NativeUnavailableError: ZERO_OFFLOAD_NATIVE=require, and there are none.
    """
    return _loaded()[1]


def kernels() -> AdamKernels | None:
    """Return the kernels in use, loaded at the first call; None where plain torch does the work.

    Raises:
        NativeUnavailableError: ZERO_OFFLOAD_NATIVE=require, and there are none.
    """
    return _loaded()[0]


@cache
def cuda_kernels() -> ctypes.CDLL:
    """The library for CUDA, loaded at the first call.

    Raises:
        NativeUnavailableError: It was not built, or is of another version.
    """
    return open_cuda_library(HERE / CUDA_LIBRARY)


@cache
def _loaded() -> tuple[AdamKernels | None, NativeStatus]:
    found, status = load(HERE / LIBRARY, os.environ)
    if found is not None and (stale := why_stale(CHECKOUT_SOURCES, HERE)):
        # The build hook reports a stale library too, but pip hides its output.
        _LOG.warning("%s", stale)
        status = evolve(status, stale=stale)
    _LOG.debug("%s", status)
    return found, status


def load(path: Path, environment: Mapping[str, str]) -> tuple[AdamKernels | None, NativeStatus]:
    """Load the library at `path` as `environment` asks; see `ZERO_OFFLOAD_NATIVE` in the README.

    Raises:
        NativeUnavailableError: Kernels are required, all or one instruction set, and missing; or
            a switch has a value it does not know.
    """
    switch = environment.get("ZERO_OFFLOAD_NATIVE") or "auto"
    isa = environment.get("ZERO_OFFLOAD_ISA", "")
    if switch not in SWITCHES:
        raise NativeUnavailableError(
            f"ZERO_OFFLOAD_NATIVE={switch!r}: expected one of {', '.join(SWITCHES)}"
        )
    if switch == "off":
        reason = "ZERO_OFFLOAD_NATIVE=off"
    elif not path.exists():
        reason = f"{path} does not exist: it was not compiled when this was installed; {BUILD_HINT}"
    else:
        try:
            found = AdamKernels(open_library(path), "scalar")
            chosen = found.with_isa(isa or found.isas[-1])
            slower = f"ZERO_OFFLOAD_ISA={isa}" if isa else f"{chosen.isa} is faster"
            others = {
                name: slower if name in found.isas else "this processor lacks it"
                for name in reversed(ISAS)
                if name != chosen.isa
            }
            return chosen, NativeStatus(chosen.isa, others=others)
        except AbiError as error:
            reason = f"{error}; {BUILD_HINT} anew"
    if switch == "require" or isa:
        asked = "ZERO_OFFLOAD_NATIVE=require" if switch == "require" else f"ZERO_OFFLOAD_ISA={isa}"
        raise NativeUnavailableError(f"{asked}, but {reason}")
    return None, NativeStatus("", reason)
