/* What every instruction set computes, over a vector type V that says how.

   V has `width` and, over V::F (that many floats): set, add, sub, mul, div, root, max, load and
   store of each dtype, and `add_squares`. The scalar one is the specification. */

#ifndef ZERO_KERNELS_H
#define ZERO_KERNELS_H

#include "scalar.h"
#include "zero_offload.h"

namespace {

constexpr int kAny = -1; /* a dtype that is known when it runs */

template <class V>
inline typename V::F read(const void *from, int64_t i, int32_t dtype) {
  switch (dtype) {
    case ZERO_F32: return V::load((const float *)from + i);
    case ZERO_BF16: return V::load_bf16((const uint16_t *)from + i);
    default: return V::load_f16((const uint16_t *)from + i);
  }
}

template <class V>
inline void write(void *to, int64_t i, int32_t dtype, typename V::F value) {
  switch (dtype) {
    case ZERO_F32: V::store((float *)to + i, value); break;
    case ZERO_BF16: V::store_bf16((uint16_t *)to + i, value); break;
    default: V::store_f16((uint16_t *)to + i, value);
  }
}

template <class V>
inline void write_rounded(void *to, const zero_tensor &t, const zero_rule &r, int64_t i,
                          int32_t dtype, typename V::F value) {
  if (r.stochastic && dtype == ZERO_BF16)
    V::store_bf16_stochastic((uint16_t *)to + i, value, (uint32_t)(t.index + i), r.seed);
  else
    write<V>(to, i, dtype, value);
}

/* from + (to - from) * weight, as torch's lerp: from the nearer end */
template <class V>
inline typename V::F lerp(typename V::F from, typename V::F to, float weight, float rest) {
  const auto way = V::sub(to, from);
  return weight < 0.5f ? V::add(from, V::mul(V::set(weight), way))
                       : V::sub(to, V::mul(way, V::set(rest)));
}

struct Adam {
  template <class V, class F>
  static inline F step(const zero_tensor &t, const zero_rule &r, int64_t i, F param, F grad) {
    const F mean = lerp<V>(read<V>(t.first, i, r.state_dtype), grad, r.one_minus_beta1, r.beta1);
    const F square = V::add(V::mul(read<V>(t.second, i, r.state_dtype), V::set(r.beta2)),
                            V::mul(V::mul(V::set(r.one_minus_beta2), grad), grad));
    write<V>(t.first, i, r.state_dtype, mean);
    write<V>(t.second, i, r.state_dtype, square);
    F spread = square;
    if (t.largest) {
      spread = V::max(read<V>(t.largest, i, r.state_dtype), square);
      write<V>(t.largest, i, r.state_dtype, spread);
    }
    const F below = V::add(V::mul(V::root(spread), V::set(r.unbias)), V::set(r.eps));
    return V::add(param, V::div(V::mul(V::set(r.rate), mean), below));
  }
};

struct Adagrad {
  template <class V, class F>
  static inline F step(const zero_tensor &t, const zero_rule &r, int64_t i, F param, F grad) {
    const F sum = V::add(read<V>(t.first, i, r.state_dtype), V::mul(grad, grad));
    write<V>(t.first, i, r.state_dtype, sum);
    const F below = V::add(V::root(sum), V::set(r.eps));
    return V::add(param, V::div(V::mul(V::set(r.rate), grad), below));
  }
};

struct Lion {
  template <class V, class F>
  static inline F step(const zero_tensor &t, const zero_rule &r, int64_t i, F param, F grad) {
    const F mean = read<V>(t.first, i, r.state_dtype);
    const F way = lerp<V>(mean, grad, r.one_minus_beta1, r.beta1);
    write<V>(t.first, i, r.state_dtype, lerp<V>(mean, grad, r.one_minus_beta2, r.beta2));
    return V::add(param, V::mul(V::sign(way), V::set(r.rate)));
  }
};

template <class Rule, class V>
inline void step_at(const zero_tensor &t, const zero_rule &r, int64_t i) {
  auto param = read<V>(t.param, i, r.param_dtype);
  auto grad = V::mul(read<V>(t.grad, i, r.grad_dtype), V::set(r.maximize ? -r.factor : r.factor));
  if (!r.decoupled && r.weight_decay != 0.0f)
    grad = V::add(grad, V::mul(param, V::set(r.weight_decay)));
  if (r.decoupled) param = V::mul(param, V::set(r.shrink));
  param = Rule::template step<V>(t, r, i, param, grad);
  write_rounded<V>(t.param, t, r, i, r.param_dtype, param);
  if (t.out) write_rounded<V>(t.out, t, r, i, r.out_dtype, param);
}

/* Elements [first, last) of the list; whole vectors, then one by one, which rounds the same.
   Dtypes that are known when this is compiled cost no branch for each vector. */
template <class Rule, class V, int kParam, int kGrad, int kState, int kOut>
void run_as(const zero_tensor *tensors, int64_t count, const zero_rule *rule, int64_t first,
            int64_t last) {
  int64_t before = 0;
  zero_rule r = *rule;
  if (kParam != kAny) r.param_dtype = kParam;
  if (kGrad != kAny) r.grad_dtype = kGrad;
  if (kState != kAny) r.state_dtype = kState;
  if (kOut != kAny) r.out_dtype = kOut;
  for (int64_t k = 0; k < count && before < last; before += tensors[k++].numel) {
    zero_tensor t = tensors[k];
    if (kOut == ZERO_NONE) t.out = nullptr;
    const int64_t stop = last - before < t.numel ? last - before : t.numel;
    int64_t i = first > before ? first - before : 0;
    for (; i + V::width <= stop; i += V::width) step_at<Rule, V>(t, r, i);
    for (; i < stop; ++i) step_at<Rule, Scalar>(t, r, i);
  }
}

template <class Rule, class V>
void run(const zero_tensor *tensors, int64_t count, const zero_rule *rule, int64_t first,
         int64_t last) {
  const int param = rule->param_dtype, grad = rule->grad_dtype, out = rule->out_dtype;
  auto as = run_as<Rule, V, kAny, kAny, kAny, kAny>;
  if (rule->state_dtype == ZERO_F32) {
    if (param == ZERO_F32 && grad == ZERO_F32 && out == ZERO_NONE)
      as = run_as<Rule, V, ZERO_F32, ZERO_F32, ZERO_F32, ZERO_NONE>;
    if (param == ZERO_F32 && grad == ZERO_BF16 && out == ZERO_BF16)
      as = run_as<Rule, V, ZERO_F32, ZERO_BF16, ZERO_F32, ZERO_BF16>;
    if (param == ZERO_F32 && grad == ZERO_F16 && out == ZERO_F16)
      as = run_as<Rule, V, ZERO_F32, ZERO_F16, ZERO_F32, ZERO_F16>;
    if (param == ZERO_BF16 && grad == ZERO_BF16 && out == ZERO_NONE)
      as = run_as<Rule, V, ZERO_BF16, ZERO_BF16, ZERO_F32, ZERO_NONE>;
  }
  as(tensors, count, rule, first, last);
}

template <class V>
void step(const zero_tensor *tensors, int64_t count, const zero_rule *rule, int64_t first,
          int64_t last) {
  switch (rule->formula) {
    case ZERO_ADAM: return run<Adam, V>(tensors, count, rule, first, last);
    case ZERO_ADAGRAD: return run<Adagrad, V>(tensors, count, rule, first, last);
    default: return run<Lion, V>(tensors, count, rule, first, last);
  }
}

/* Sixteen sums, whatever the width, so that the result does not depend on it. */
constexpr int kSums = 16;

template <class V>
void sum_squares(const void *from, int32_t dtype, int64_t numel, double *sum,
                 int64_t *num_not_finite) {
  double sums[kSums] = {}, total = 0;
  int64_t bad = 0, i = 0;
  for (; i + V::width <= numel; i += V::width)
    bad += V::add_squares(sums, (int)(i % kSums), read<V>(from, i, dtype));
  for (; i < numel; ++i)
    bad += Scalar::add_squares(sums, (int)(i % kSums), read<Scalar>(from, i, dtype));
  for (double part : sums) total += part;
  *sum = total;
  *num_not_finite = bad;
}

}  // namespace

struct zero_kernels { /* of one instruction set */
  void (*step)(const zero_tensor *, int64_t, const zero_rule *, int64_t, int64_t);
  void (*sum_squares)(const void *, int32_t, int64_t, double *, int64_t *);
};
extern const zero_kernels kernels_scalar, kernels_vector, kernels_avx2, kernels_avx512;

#define ZERO_KERNELS(V, suffix) const zero_kernels kernels_##suffix = {step<V>, sum_squares<V>};

#endif
