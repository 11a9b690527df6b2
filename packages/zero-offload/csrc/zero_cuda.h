/* The optional second library: Adam over a list of tensors on one CUDA device, in one launch. */

#ifndef ZERO_CUDA_H
#define ZERO_CUDA_H

#include "zero_offload.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A piece of one tensor; the table of them lies in device memory, as many as there are blocks. */
typedef struct {
  void *param;      /* updated in place; of param_dtype */
  const void *grad; /* of grad_dtype */
  void *first;      /* exp_avg, of state_dtype */
  void *second;     /* exp_avg_sq */
  void *largest;    /* max_exp_avg_sq, or null */
  void *out;        /* the parameter once more, of out_dtype; or null */
  const float *step; /* the number of this step of its tensor, from 1 */
  int64_t numel;
} zero_cuda_piece;

/* What changes from step to step is read on the device, so that a captured graph goes on being
   right: pointers to one float32 each, null for none. */
typedef struct {
  int32_t param_dtype, grad_dtype, state_dtype, out_dtype;
  int32_t maximize, decoupled;
  float beta1, beta2, eps, weight_decay;
  float lr;               /* where there is no rate */
  const float *rate;      /* the learning rate */
  const float *divisor;   /* gradients are divided by it first */
  const float *found_inf; /* nothing is changed unless it is 0 */
} zero_cuda_rule;

ZERO_API int zero_cuda_abi(void);

/* Elements of a piece at most. */
ZERO_API int64_t zero_cuda_piece_numel(void);

/* Add 1 to each step, unless found_inf; before zero_cuda_adam, on the same stream. `steps` is a
   table in device memory. Returns a cudaError_t. */
ZERO_API int zero_cuda_advance(float *const *steps, int64_t count, const float *found_inf,
                               void *stream);

ZERO_API int zero_cuda_adam(const zero_cuda_piece *pieces, int64_t count,
                            const zero_cuda_rule *rule, void *stream);

ZERO_API const char *zero_cuda_error(int code);

#ifdef __cplusplus
}
#endif
#endif
