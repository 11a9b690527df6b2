/* The native surface of zero-comm, plain C: blockwise codecs of float32 values, on one thread.
 *
 * `bits` is 8 or 4, `block` even. `integers` has numel bytes, or (numel + 1) / 2; `scales` one float
 * for each block. Bit for bit what `_blockwise.py` says.
 */
#ifndef ZERO_COMM_H
#define ZERO_COMM_H

#include <stdint.h>

#define ZERO_COMM_ABI 1 /* counts changes of what follows */

#ifdef __cplusplus
extern "C" {
#endif

int zero_comm_abi(void);

void zero_comm_encode(const float *values, int64_t numel, int bits, int64_t block, uint8_t *integers,
                      float *scales);

/* Overwrites `out`, or adds to it. */
void zero_comm_decode(const uint8_t *integers, const float *scales, int64_t numel, int bits,
                      int64_t block, float *out, int adds);

#ifdef __cplusplus
}
#endif

#endif
