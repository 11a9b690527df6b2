#include "kernels.h"
#include "scalar.h"

ZERO_KERNELS(Scalar, Scalar, scalar)
