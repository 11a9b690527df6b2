"""One thread for each process that tests run in: workers and ranks share the cores."""

import os

# Before torch is imported. Two workers of two threads each wait for each other at every operation;
# and sums depend on the number of threads, so an oracle must have as many as a rank.
os.environ["OMP_NUM_THREADS"] = "1"

# Programs that tests let fail leave no reports.
os.environ["ZERO_REPORT"] = "off"
