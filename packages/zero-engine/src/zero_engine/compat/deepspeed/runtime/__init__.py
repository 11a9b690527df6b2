"""deepspeed.runtime: what scripts import from inside DeepSpeed."""
