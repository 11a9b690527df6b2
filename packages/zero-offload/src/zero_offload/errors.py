"""Errors of offloaded tensors and of the optimizers that step them, one type per remedy."""


class OffloadError(RuntimeError):
    """The root of this package's errors."""


class NativeUnavailableError(OffloadError):
    """Compiled kernels were required, by ZERO_OFFLOAD_NATIVE=require or by name, and do not run."""


class UnsupportedTensorError(OffloadError, TypeError):
    """A parameter or gradient that CPU optimizers do not step: its device, dtype or layout."""


class BudgetError(OffloadError, MemoryError):
    """Host memory was asked for that the budget, or the machine, does not have.

    Attributes:
        nbytes: Bytes that were asked for.
        held: Bytes that are allocated already, by name.
    """

    def __init__(
        self, message: str, *, nbytes: int = 0, held: dict[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.nbytes = nbytes
        self.held = dict(held or {})


class StoreError(OffloadError, OSError):
    """A store cannot write a value, or cannot read it.

    Attributes:
        key: Key of the value; empty where the error is not about one.
        path: Path of the file or folder; empty for a store in memory.
        nbytes: Bytes that were to be written or read.
        errno: Error number of the system, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str = "",
        path: str = "",
        nbytes: int = 0,
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.key = key
        self.path = path
        self.nbytes = nbytes
        self.errno = errno


class UnsupportedOptimizerError(OffloadError, TypeError):
    """An optimizer that cannot be stepped sub-group by sub-group, or not on the host."""


class DepartedGradientError(OffloadError):
    """A gradient was read on its device after it was moved to the host."""


class TornStepError(OffloadError):
    """A step ended midway: some sub-groups are stepped, others not. Load a state dict to go on."""
