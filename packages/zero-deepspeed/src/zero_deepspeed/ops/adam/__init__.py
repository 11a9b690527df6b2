"""deepspeed.ops.adam: Adam on the host and on the device, with DeepSpeed's arguments."""

from .cpu_adam import DeepSpeedCPUAdam
from .fused_adam import FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
