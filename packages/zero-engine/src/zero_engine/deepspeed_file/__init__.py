"""deepspeed_file."""
