"""Host memory: arenas that count and pin it, and copies between it and devices."""
