"""Adam, Adagrad and Lion over tensors in host memory, and Adam over those of a CUDA device.

The optimizers of cpu_optimizers.py collect the parameters of a step in batches (batches.py): runs
of elements with the same rule and the same dtypes. One native call steps a batch, in one pass over
memory; parallel.py divides its elements among threads. reference.py has the same formulas in plain
torch. It runs where nothing was compiled, and is the specification of the kernels. `FusedAdam`
(fused.py) is a CUDA kernel for all parameters of a device.

Read reference.py first, then batches.py. What must never happen: native code and reference.py give
other bits, or the number of threads changes a result.
"""
