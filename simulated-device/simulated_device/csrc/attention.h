// Attention as one kernel, in the timed mode: with torch's composite it would be a dozen, and write
// the scores of all pairs to memory. Where values count, torch's composite runs.
#pragma once

#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include <optional>
#include <string>

#include "device.h"
#include "operands.h"

namespace sim {

inline int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&,
                                const std::optional<Tensor>&, double, bool, std::optional<double>,
                                bool) {
  auto backend = Engine::get().is_timed() ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math;
  return static_cast<int64_t>(backend);
}

// An operator's arguments, by name.
class Named {
 public:
  Named(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema_(op.schema()),
        values_(stack.end() - static_cast<int64_t>(schema_.arguments().size()), stack.end()) {
    torch::jit::drop(stack, values_.size());
  }
  const c10::IValue& operator[](const char* name) const {
    return values_.at(*schema_.argumentIndexWithName(name));
  }
  Tensor tensor(const char* name) const { return (*this)[name].toTensor(); }

 private:
  const c10::FunctionSchema& schema_;
  std::vector<c10::IValue> values_;
};

// `share` of the operations of a forward, which are two products for each pair of positions.
inline void launch_attention(std::string_view name, const Named& given, double share,
                             double num_passes) {
  Tensor query = given.tensor("query"), key = given.tensor("key");
  double pairs = static_cast<double>(query.numel()) * static_cast<double>(key.size(-2));
  double operations = 4 * pairs * share * (given["is_causal"].toBool() ? 0.5 : 1);
  double bytes = num_passes * static_cast<double>(query.nbytes() + key.nbytes());
  Lock lock;
  Task task{.name = name};
  task.seconds = Engine::get().rates.kernel(bytes, operations, query.scalar_type());
  Engine::get().launch(lock, current_stream(query.device().index()), std::move(task));
}

inline void attention(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  HostPause pause;
  Named given(op, *stack);
  Tensor query = given.tensor("query"), value = given.tensor("value");
  auto shape = query.sizes().vec();
  shape.back() = value.size(-1);
  Tensor none, out = at::empty(shape, query.options());
  shape.pop_back();
  Tensor sums = at::empty(shape, query.options().dtype(at::kFloat));
  launch_attention("aten::attention", given, 1, 2);
  torch::jit::push(*stack, out, sums, none, none, query.size(-2), given.tensor("key").size(-2),
                   none, none, none);
}

inline void attention_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  HostPause pause;
  Named given(op, *stack);
  launch_attention("aten::attention_backward", given, 2.5, 5);  // five products instead of two
  torch::jit::push(*stack, at::empty_like(given.tensor("query")),
                   at::empty_like(given.tensor("key")), at::empty_like(given.tensor("value")),
                   Tensor());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_scaled_dot_product_fused_attention_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&attention>());
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward",
               torch::CppFunction::makeFromBoxedFunction<&attention_backward>());
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}
