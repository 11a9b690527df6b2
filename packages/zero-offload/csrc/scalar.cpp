#include "kernels.h"

ZERO_KERNELS(Scalar, scalar)
