// Kernels: torch's own for the CPU, launched through one fallback for all operators.
//
// A kernel need not run when it is launched, so the shapes of its results come from torch's meta
// kernels. Operators whose shapes depend on values, and those that return numbers to the host, wait
// for the stream and run at once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"
#include "operands.h"
#include "substitutes.h"

namespace sim {

// ---- operators ----------------------------------------------------------------------------------

// What an operator's schema says, worked out once.
struct OperatorTraits {
  explicit OperatorTraits(const OperatorHandle& op);

  // Runs the kernel for tensors of the CPU.
  void run(const OperatorHandle& op, Stack& stack) const {
    substitute ? substitute(op, stack) : op.callBoxed(&stack);
  }

  std::string name;                   // with its namespace, without its overload
  Substitute substitute = nullptr;    // runs in place of the CPU's kernel; null: nothing does
  bool has_kernel = true;             // torch has one for the CPU
  std::vector<bool> writes;           // by argument: the kernel writes to it
  std::vector<bool> is_out;           // by argument: out=, which takes the result's shape
  std::vector<bool> takes_generator;  // by argument
  bool is_random = false;
  bool is_dynamic = false;      // shapes of results are only known when the kernel has run
  bool returns_new = false;     // tensors of their own memory
  bool returns_view = false;    // a tensor that shares its first argument's memory
  bool returns_number = false;  // something else than tensors
  bool has_out = false;
  bool takes_indices = false;       // which may be on the host, and may be masks
  bool takes_host_tensors = false;  // as other devices do, too
};

inline OperatorTraits::OperatorTraits(const OperatorHandle& op)
    : name(op.schema().name()),
      substitute(substitute_for(name)),
      has_kernel(op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
  static const std::set<std::string> kTakeIndices{
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::_unsafe_masked_index"};
  static const std::set<std::string> kTakeHostTensors{
      "aten::_pack_padded_sequence", "aten::_pad_packed_sequence", "aten::_ctc_loss"};
  // Running statistics, which the schema does not declare as written.
  static const std::set<std::string> kUpdateStatistics{"aten::native_batch_norm"};
  // The CPU's kernels return tensors for their own backward that meta kernels leave empty.
  static const std::set<std::string> kHaveOwnShapes{"aten::_embedding_bag",
                                                    "aten::_embedding_bag_forward_only"};

  for (const auto& argument : op.schema().arguments()) {
    bool is_statistic = kUpdateStatistics.count(name) && argument.name().starts_with("running_");
    bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    writes.push_back(is_written || is_statistic);
    is_out.push_back(is_written && argument.kwarg_only());
    takes_generator.push_back(argument.type()->str().find("Generator") != std::string::npos);
    has_out |= is_out.back();
  }
  for (const auto& result : op.schema().returns()) {
    auto kind = result.type()->kind();
    if (result.alias_info()) returns_view |= !result.alias_info()->isWrite();
    else if (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType)
      returns_new = true;
    else returns_number = true;
  }
  takes_indices = kTakeIndices.count(name) > 0;
  takes_host_tensors = takes_indices || kTakeHostTensors.count(name) > 0;
  is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  is_dynamic = op.hasTag(at::Tag::dynamic_output_shape) ||
               op.hasTag(at::Tag::data_dependent_output) || kHaveOwnShapes.count(name) > 0;
}

// Returns an operator's traits; the reference stays valid.
inline const OperatorTraits& traits_of(const OperatorHandle& op) {
  static auto* known = new std::unordered_map<c10::OperatorName, OperatorTraits>();
  static auto* mutex = new std::mutex();
  std::lock_guard<std::mutex> guard(*mutex);
  auto found = known->find(op.operator_name());
  if (found == known->end())
    found = known->emplace(op.operator_name(), OperatorTraits(op)).first;
  return found->second;
}

// ---- on the CPU ---------------------------------------------------------------------------------

// A kernel that is ready to run: an operator and its arguments, as tensors of the CPU.
struct HostKernel {
  OperatorHandle op;
  const OperatorTraits& traits;
  Stack arguments;             // replaced by the results when it runs; out= arguments are left out
  std::vector<std::pair<size_t, Tensor>> outs;  // those: by argument, aliases of the memory

  // Runs it. Kernels use out= as scratch memory of another shape, so each gets one of its own.
  // Returns the scratch tensors, in the order of `outs`.
  std::vector<Tensor> run() {
    std::vector<Tensor> scratch;
    for (auto& [index, out] : outs) {
      scratch.push_back(at::empty({0}, out.options()));
      arguments[index] = scratch.back();
    }
    traits.run(op, arguments);
    return scratch;
  }

  const IValue& result(size_t index) const {
    return arguments[arguments.size() - op.schema().returns().size() + index];
  }
};

inline void copy_checked(const Tensor& target, const Tensor& source, const char* what) {
  if (!target.defined() || !source.defined()) return;
  TORCH_CHECK(target.sizes() == source.sizes(), "sim: ", what, " has shape ", target.sizes(),
              ", the kernel's result ", source.sizes());
  if (target.numel()) target.copy_(source);
}

// ---- one call of an operator --------------------------------------------------------------------

class Call {
 public:
  // Takes the arguments off the stack.
  Call(const OperatorHandle& op, Stack& stack);

  // Runs or launches the operator, and puts its results on the stack.
  void execute(Stack& stack);

 private:
  void find_device();
  void prepare_arguments();
  void check_device(const Tensor& tensor) const;
  bool has_sparse() const;
  bool must_run_now() const;
  bool infer_results();
  void push_views(Stack& stack) const;
  void resize_outs() const;
  HostKernel make_kernel() const;
  IValue host_argument(const IValue& argument) const;
  void seed_kernel(HostKernel& kernel) const;
  void note_uses(Point point) const;
  const IValue& written_argument(const c10::Argument& result) const;
  void run_now(Stack& stack);
  IValue take_result(const c10::Argument& result, const IValue& value, bool is_scratch);
  Tensor upload(const Tensor& value) const;
  void replace_parts(const Tensor& target, const Tensor& value) const;
  void write(const Tensor& target, const Tensor& value) const;
  void launch(Stack& stack);
  void time(Task& task, const std::vector<Tensor>& made) const;

  const OperatorHandle& op_;
  const OperatorTraits& traits_;
  std::vector<IValue> arguments_;       // as they were given, but indices on the device
  Device device_{kSim, current_device};  // where it runs
  std::vector<IValue> meta_arguments_;  // after infer_results(): arguments without memory
  std::vector<IValue> meta_results_;    // after infer_results(), by return
};

inline Call::Call(const OperatorHandle& op, Stack& stack)
    : op_(op),
      traits_(traits_of(op)),
      arguments_(stack.end() - op.schema().arguments().size(), stack.end()) {
  torch::jit::drop(stack, arguments_.size());
}

inline void Call::execute(Stack& stack) {
  find_device();
  c10::DeviceGuard guard(device_);
  prepare_arguments();
  if (must_run_now()) return run_now(stack);
  bool needs_shapes = traits_.returns_new || traits_.returns_view || traits_.has_out;
  if (needs_shapes && !infer_results()) return run_now(stack);
  if (traits_.returns_view) return push_views(stack);
  resize_outs();
  launch(stack);
}

// Takes the device of the first tensor on one, or else of an argument that names one.
inline void Call::find_device() {
  std::optional<Device> found;
  for (const IValue& argument : arguments_) {
    for_each_tensor(argument, [&](const Tensor& tensor) {
      if (!found && is_sim(tensor)) found = tensor.device();
    });
    if (!found && is_device_sim(argument)) found = argument.toDevice();
  }
  if (found && found->has_index()) device_ = *found;
}

inline void Call::prepare_arguments() {
  for (IValue& argument : arguments_) {
    if (traits_.takes_indices && argument.isOptionalTensorList())
      argument = map_tensors(argument, [&](const Tensor& index) {
        return index.defined() && index.is_cpu() ? index.to(device_) : index;
      });
    for_each_tensor(argument, [&](const Tensor& tensor) { check_device(tensor); });
  }
}

inline void Call::check_device(const Tensor& tensor) const {
  if (!tensor.defined()) return;
  bool is_host_scalar = tensor.is_cpu() && (tensor.dim() == 0 || traits_.takes_host_tensors);
  TORCH_CHECK(is_host_scalar || tensor.device() == device_,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              device_, " and ", tensor.device(), "! (", traits_.name, ")");
}

inline bool Call::has_sparse() const {
  bool found = false;
  for (const IValue& argument : arguments_)
    for_each_tensor(argument, [&](const Tensor& tensor) {
      found |= tensor.defined() && tensor.is_sparse();
    });
  return found;
}

inline bool Call::must_run_now() const {
  if (traits_.returns_number || has_sparse()) return true;
  if (!traits_.takes_indices) return traits_.is_dynamic && (traits_.returns_new || traits_.has_out);
  // Masks become lists of positions, whose length depends on values.
  bool has_mask = false;
  for (const IValue& argument : arguments_)
    if (argument.isOptionalTensorList())
      for_each_tensor(argument, [&](const Tensor& index) {
        has_mask |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
      });
  return has_mask;
}

// Learns the shapes of results from torch's meta kernel. Returns false where there is none.
inline bool Call::infer_results() {
  for (const IValue& argument : arguments_) {
    IValue meta = map_tensors(
        argument, [](const Tensor& tensor) { return is_sim(tensor) ? meta_of(tensor) : tensor; });
    if (is_device_sim(meta)) meta = IValue(Device(at::kMeta));
    if (meta.isGenerator()) meta = IValue();
    meta_arguments_.push_back(std::move(meta));
  }
  Stack stack = meta_arguments_;
  try {
    KernelDispatch dispatch;
    // What has no kernel for the CPU may have none for meta tensors; its substitute runs on both.
    if (traits_.substitute && !traits_.has_kernel) traits_.run(op_, stack);
    else op_.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
    Lock lock;
    Engine::get().without_meta[traits_.name]++;
    return false;
  }
  meta_results_.assign(stack.end() - op_.schema().returns().size(), stack.end());
  return true;
}

inline void Call::push_views(Stack& stack) const {
  TORCH_CHECK(meta_results_.size() == 1, "sim: ", traits_.name, " returns several views");
  const Tensor& base = arguments_[0].toTensor();
  torch::jit::push(stack, map_tensors(meta_results_[0], [&](const Tensor& view) {
    TORCH_CHECK(view.dtype() == base.dtype(), "sim: ", traits_.name, " views another dtype");
    return at::native::as_strided_tensorimpl(base, view.sizes(), view.strides(),
                                             base.storage_offset() + view.storage_offset());
  }));
}

// Gives out= arguments the shapes that the meta kernel gave their likes.
inline void Call::resize_outs() const {
  for (size_t i = 0; i < arguments_.size(); i++) {
    if (!traits_.is_out[i] || !arguments_[i].isTensor()) continue;
    const Tensor &out = arguments_[i].toTensor(), &meta = meta_arguments_[i].toTensor();
    if (out.sizes() == meta.sizes()) continue;
    out.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
    size_t bytes = at::detail::computeStorageNbytes(meta.sizes(), meta.strides(), out.itemsize(),
                                                    out.storage_offset());
    if (bytes > out.storage().nbytes()) resize_bytes(*out.storage().unsafeGetStorageImpl(), bytes);
  }
}

inline HostKernel Call::make_kernel() const {
  HostKernel kernel{op_, traits_, {}, {}};
  for (size_t i = 0; i < arguments_.size(); i++) {
    IValue argument = host_argument(arguments_[i]);
    if (traits_.is_out[i] && argument.isTensor()) {
      kernel.outs.emplace_back(i, argument.toTensor());
      argument = IValue();
    }
    kernel.arguments.push_back(std::move(argument));
  }
  if (traits_.is_random) seed_kernel(kernel);
  return kernel;
}

inline IValue Call::host_argument(const IValue& argument) const {
  if (is_device_sim(argument)) return Device(at::kCPU);
  if (argument.isGenerator()) return IValue();  // seed_kernel() gives it another
  return map_tensors(argument, [](const Tensor& tensor) {
    if (is_sim(tensor)) return kernel_operand(tensor);
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    // The host may change its tensor before the kernel runs.
    Tensor copy = tensor.detach().clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  });
}

inline void Call::seed_kernel(HostKernel& kernel) const {
  std::optional<at::Generator> given;
  for (const IValue& argument : arguments_)
    if (argument.isGenerator()) given = argument.toGenerator();
  at::Generator own = at::detail::createCPUGenerator(draw_seed(given, device_.index()));
  bool takes_generator = false;
  for (size_t i = 0; i < arguments_.size(); i++) {
    if (!traits_.takes_generator[i]) continue;
    kernel.arguments[i] = own;
    takes_generator = true;
  }
  if (takes_generator) return;
  // The CPU's default generator is the host's, which may use it while the kernel runs.
  TORCH_CHECK(traits_.substitute, "sim: ", traits_.name, " draws without a generator; write a ",
              "substitute that takes one");
  kernel.arguments.emplace_back(own);
}

inline void Call::note_uses(Point point) const {
  for (size_t i = 0; i < arguments_.size(); i++)
    for_each_tensor(arguments_[i], [&](const Tensor& tensor) {
      if (is_sim(tensor))
        for_each_part(tensor, [&](const Tensor& part) {
          note_use(part, traits_.writes[i], point, traits_.name);
        });
    });
}

// Returns the argument that a result is the same tensor as.
inline const IValue& Call::written_argument(const c10::Argument& result) const {
  const auto& parameters = op_.schema().arguments();
  for (size_t i = 0; i < parameters.size(); i++) {
    const auto* info = parameters[i].alias_info();
    if (info && info->beforeSets() == result.alias_info()->beforeSets()) return arguments_[i];
  }
  TORCH_CHECK(false, "sim: ", traits_.name, " returns an alias of no argument");
}

// ---- launched, and run later

inline void Call::launch(Stack& stack) {
  HostKernel kernel = make_kernel();
  std::vector<std::vector<Tensor>> targets;  // by return: aliases of new tensors
  std::vector<Tensor> made;
  const auto& returns = op_.schema().returns();
  Stack results;
  for (size_t i = 0; i < returns.size(); i++) {
    targets.emplace_back();
    if (returns[i].alias_info()) {
      results.push_back(written_argument(returns[i]));
      continue;
    }
    results.push_back(map_tensors(meta_results_[i], [&](const Tensor& meta) {
      if (!meta.defined()) {
        targets.back().push_back(meta);
        return meta;
      }
      made.push_back(empty_on_device(meta.sizes(), meta.strides(), meta.scalar_type(), device_));
      targets.back().push_back(kernel_operand(made.back()));
      return made.back();
    }));
  }
  auto run = [kernel = std::move(kernel), targets]() mutable {
    std::vector<Tensor> scratch = kernel.run();
    for (size_t i = 0; i < scratch.size(); i++)
      copy_checked(kernel.outs[i].second, scratch[i], "out=");
    for (size_t i = 0; i < targets.size(); i++) {
      size_t next = 0;
      if (targets[i].empty()) continue;
      for_each_tensor(kernel.result(i), [&](const Tensor& value) {
        copy_checked(targets[i].at(next++), value, "the meta kernel's result");
      });
    }
  };
  {
    Lock lock;
    Task task{.name = traits_.name, .run = std::move(run)};
    if (Engine::get().is_timed()) time(task, made);
    Point point =
        Engine::get().launch(lock, current_stream(device_.index()), std::move(task));
    note_uses(point);
    for (const Tensor& tensor : made) note_use(tensor, true, point, traits_.name);
  }
  for (IValue& result : results) torch::jit::push(stack, std::move(result));
}

// Says how long it runs on a device: by its bytes and, of products of matrices, its operations.
inline void Call::time(Task& task, const std::vector<Tensor>& made) const {
  double bytes = 0;
  for (const Tensor& tensor : made) bytes += static_cast<double>(tensor.nbytes());
  std::vector<Tensor> given;
  for (size_t i = 0; i < arguments_.size(); i++)
    for_each_tensor(arguments_[i], [&](const Tensor& tensor) {
      if (!tensor.defined() || !is_sim(tensor) || tensor.is_sparse()) return;
      given.push_back(tensor);
      bool is_read_too = traits_.writes[i] && !traits_.is_out[i];
      bytes += static_cast<double>(tensor.nbytes()) * (is_read_too ? 2 : 1);
    });
  bool is_product = traits_.name == "aten::mm" || traits_.name == "aten::bmm";
  bool adds = traits_.name == "aten::addmm" || traits_.name == "aten::baddbmm";
  size_t first = adds ? 1 : 0;
  double operations = 0;
  auto type = at::kFloat;
  if ((is_product || adds) && given.size() >= first + 2) {
    type = given[first].scalar_type();
    operations = 2.0 * static_cast<double>(given[first].numel()) *
                 static_cast<double>(given[first + 1].size(-1));
  }
  task.seconds = Engine::get().rates.kernel(bytes, operations, type);
  task.is_small = bytes <= kSmallBytes;
}

// ---- run at once, because the host needs its values

inline void Call::run_now(Stack& stack) {
  HostKernel kernel = make_kernel();
  std::vector<Tensor> scratch;
  {
    Lock lock;
    auto& engine = Engine::get();
    StreamIndex stream = current_stream(device_.index());
    engine.count_host_wait(traits_.name);
    Task task{.name = traits_.name};
    if (engine.is_timed()) time(task, {});
    Point point = engine.launch(lock, stream, std::move(task));
    note_uses(point);
    engine.synchronize_stream(lock, stream);
    // Values mean nothing in the timed mode: who compares them is told that nobody has written any.
    if (engine.is_timed() && traits_.name == "aten::equal") return torch::jit::push(stack, true);
    KernelDispatch dispatch;
    scratch = kernel.run();
  }
  const auto& returns = op_.schema().returns();
  for (size_t i = 0; i < returns.size(); i++)
    torch::jit::push(stack, take_result(returns[i], kernel.result(i), !scratch.empty()));
}

inline IValue Call::take_result(const c10::Argument& result, const IValue& value,
                                bool is_scratch) {
  if (!result.alias_info() || !result.alias_info()->isWrite())
    return map_tensors(value, [&](const Tensor& tensor) { return upload(tensor); });
  const IValue& target = written_argument(result);
  if (value.isTensor() && value.toTensor().is_sparse())
    replace_parts(target.toTensor(), value.toTensor());
  else if (is_scratch && target.isTensor() && value.isTensor()) {
    target.toTensor().resize_(value.toTensor().sizes());
    write(target.toTensor(), value.toTensor());
  }
  return target;
}

// Gives a sparse tensor what a kernel left in its alias, which may be other indices and values.
inline void Call::replace_parts(const Tensor& target, const Tensor& value) const {
  auto *ours = at::sparse::get_sparse_impl(target), *found = at::sparse::get_sparse_impl(value);
  auto replaced = [&](const Tensor& before, const Tensor& after) {
    bool is_same = before.sizes() == after.sizes() &&
                   kernel_operand(before).const_data_ptr() == after.const_data_ptr();
    return is_same ? before : upload(after);
  };
  Tensor indices = replaced(ours->indices(), found->indices());
  Tensor values = replaced(ours->values(), found->values());
  ours->raw_resize_(found->sparse_dim(), found->dense_dim(), found->sizes());
  ours->set_indices_and_values_unsafe(indices, values);
  ours->set_coalesced(found->coalesced());
}

inline Tensor Call::upload(const Tensor& value) const {
  if (!value.defined()) return value;
  if (value.is_sparse())
    return map_parts(value, [&](const Tensor& part) { return upload(part); });
  Tensor tensor = empty_on_device(value.sizes(), value.strides(), value.scalar_type(), device_);
  write(tensor, value);
  return tensor;
}

// Writes at once, after the stream's tasks.
inline void Call::write(const Tensor& target, const Tensor& value) const {
  if (target.numel() == 0) return;
  Tensor to = kernel_operand(target);
  Lock lock;
  auto& engine = Engine::get();
  StreamIndex stream = current_stream(device_.index());
  engine.synchronize_stream(lock, stream);
  KernelDispatch dispatch;
  to.copy_(value);
  note_use(target, true, engine.moment(stream).point, traits_.name);
}

// ---- registration -------------------------------------------------------------------------------

inline void fallback(const OperatorHandle& op, Stack* stack) {
  HostPause pause;
  Call(op, *stack).execute(*stack);
}

// Operators on lists of tensors are one kernel, as on CUDA; and as there, torch's loop over the
// tensors runs where some are on the host.
inline void foreach_fallback(const OperatorHandle& op, Stack* stack) {
  bool has_host_tensors = false;
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++)
    for_each_tensor((*stack)[i], [&](const Tensor& tensor) {
      has_host_tensors |= tensor.is_cpu() && tensor.dim() > 0;
    });
  constexpr auto kLoop = c10::DispatchKey::CompositeExplicitAutograd;
  if (has_host_tensors && op.hasKernelForDispatchKey(kLoop)) {
    op.callBoxedForDispatchKey(kLoop, *stack);
  } else {
    fallback(op, stack);
  }
}

// Whether torch would run other operators instead of this one, though the CPU has a kernel for it:
// the fallback only serves operators without a composite. Convolutions ask for an implementation
// of the device's own.
inline bool would_be_composite(const OperatorHandle& op) {
  const auto& name = op.schema().name();
  if (name == "aten::convolution" || name == "aten::convolution_backward") return true;
  auto has = [&](c10::DispatchKey key) { return op.hasKernelForDispatchKey(key); };
  return name.starts_with("aten::") && has(c10::DispatchKey::CPU) &&
         (has(c10::DispatchKey::CompositeImplicitAutograd) ||
          has(c10::DispatchKey::CompositeExplicitAutograd) ||
          has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    if (name.name.starts_with("aten::_foreach_")) {
      library.impl(c10::toString(name).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&foreach_fallback>());
    } else if (would_be_composite(*op)) {
      library.impl(c10::toString(name).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

}  // namespace sim
