"""deepspeed.runtime.zero: names for what ZeRO does."""
