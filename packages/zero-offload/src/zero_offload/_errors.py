"""What can go wrong where tensors rest and are stepped, one type per remedy."""


class OffloadError(RuntimeError):
    """The root of this package's errors."""


class NativeUnavailableError(OffloadError):
    """Compiled kernels were required, by ZERO_OFFLOAD_NATIVE=require or by name, and do not run."""


class UnsupportedTensorError(OffloadError, TypeError):
    """A parameter or gradient that CPU optimizers do not step: its device, dtype or layout."""


class StepOrderError(OffloadError):
    """Ranges of one step overlap, or a step began before all ranges of the last were done."""


class RollbackError(OffloadError):
    """There is no step to roll back, or it was not kept."""
