"""deepspeed.ops.adam.cpu_adam: `zero_offload.CPUAdam`, with the arguments in DeepSpeed's order."""

from zero_deepspeed.optimizers import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
