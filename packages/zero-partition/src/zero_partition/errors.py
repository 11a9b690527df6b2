"""Errors of partitioned models, one type per remedy."""


class LayoutError(ValueError):
    """Tensors and world size do not fit the layout asked for."""


class PartitionError(ValueError):
    """A model or an optimizer cannot be partitioned as it is."""


class StateError(RuntimeError):
    """A partitioned model was used at a moment, or in a way, that is not supported."""


class LoadError(ValueError):
    """Weights do not fit the model they were to be loaded into; nothing was written."""


class ShardedParamError(StateError):
    """The values of a parameter were read or written while it is sharded."""


class OverlapError(StateError):
    """A parameter that is gathered already was to be gathered again."""


class SanitizerError(StateError):
    """Memory or values are not what they must be; see `PartitionConfig.sanitize`."""


class LostEditError(StateError):
    """A gathered parameter was written in a way that is lost when it is sharded again."""
