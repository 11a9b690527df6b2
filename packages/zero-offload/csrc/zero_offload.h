/* The whole native surface of zero-offload: plain C over pointers, no state.

   Every kernel works on elements [first, last) of a list of tensors laid end to end, so that the
   caller divides the work among its threads. Results do not depend on how it does, nor on the
   instruction set: each operation is rounded on its own (nothing is contracted to fma), in the order
   that kernels.h shows, which is that of torch's optimizers. */

#ifndef ZERO_OFFLOAD_H
#define ZERO_OFFLOAD_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ZERO_API __attribute__((visibility("default")))

#define ZERO_ABI 3 /* of the structs below; Python compares */

enum { ZERO_F32 = 0, ZERO_BF16 = 1, ZERO_F16 = 2, ZERO_NONE = 3 };     /* dtypes */
enum { ZERO_SCALAR = 0, ZERO_VECTOR = 1, ZERO_AVX2 = 2, ZERO_AVX512 = 3 }; /* instruction sets */

typedef struct {
  int64_t numel;
  void *param;      /* of param_dtype, updated in place: the master, where there is one */
  const void *grad; /* of grad_dtype */
  void *first;      /* Adam: exp_avg; Lion: exp_avg; Adagrad: sum of squares; of state_dtype */
  void *second;     /* Adam: exp_avg_sq, of state_dtype; else unused */
  void *largest;    /* Adam with amsgrad: max_exp_avg_sq, of state_dtype; else null */
  void *out;        /* the new parameter once more, of out_dtype; null without */
  int64_t index;    /* of the first element, for stochastic rounding */
} zero_tensor;

typedef struct {
  int32_t param_dtype, grad_dtype, state_dtype, out_dtype;
  int32_t maximize, decoupled, stochastic; /* flags; stochastic: rounding of bf16 param and out */
  float factor;       /* what gradients are multiplied by first: unscaling and clipping */
  float weight_decay; /* added to the gradient times the parameter, unless decoupled */
  float shrink;       /* what the parameter is multiplied by, if decoupled: 1 - lr * weight_decay */
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float unbias;       /* Adam: 1 / sqrt(1 - beta2^t), what the root is multiplied by */
  float eps;
  float rate;         /* minus the step size: Adam -lr / (1 - beta1^t), Adagrad, Lion -lr */
  uint32_t seed;      /* of stochastic rounding */
} zero_rule;

ZERO_API int zero_abi(void);

/* Whether this processor has an instruction set, and the library a kernel for it. VECTOR is what
   the compiler makes of vectors of four floats: SSE2, NEON. */
ZERO_API int zero_has(int isa);

ZERO_API void zero_adam(int isa, const zero_tensor *tensors, int64_t count, const zero_rule *rule,
                        int64_t first, int64_t last);
ZERO_API void zero_adagrad(int isa, const zero_tensor *tensors, int64_t count,
                           const zero_rule *rule, int64_t first, int64_t last);
ZERO_API void zero_lion(int isa, const zero_tensor *tensors, int64_t count, const zero_rule *rule,
                        int64_t first, int64_t last);

/* Add 1 to each of many numbers: step counts, of which every parameter has its own. */
ZERO_API void zero_count(float *const *numbers, int64_t count);

/* Read a gradient where it arrives: `to` becomes it, or has it added, as float32 (null: neither),
   and `sum` its sum of squares, in double, of which inf and nan are left out and counted. */
ZERO_API void zero_take(int isa, const void *from, int32_t dtype, float *to, int32_t adds,
                        int64_t numel, double *sum, int64_t *num_not_finite);

#ifdef __cplusplus
}
#endif
#endif
