// What kernels get instead of a device's tensors: tensors of the CPU over the same memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/native/SparseTensorUtils.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <vector>

#include "allocator.h"
#include "pinned.h"
#include "streams.h"

namespace sim {

using at::Tensor;
using c10::IValue;

inline bool is_sim(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

inline Tensor over_memory(const Tensor& tensor, char* start) {
  if (tensor.numel() == 0)
    return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  Tensor operand = at::from_blob(start, tensor.sizes(), tensor.strides(), [](void*) {}, options);
  operand._set_conj(tensor.is_conj());
  operand._set_neg(tensor.is_neg());
  return operand;
}

// Calls `visit` with the tensors that have the memory: of a sparse tensor, indices and values.
template <typename Visit>
void for_each_part(const Tensor& tensor, Visit visit) {
  if (!tensor.is_sparse()) return visit(tensor);
  auto* impl = at::sparse::get_sparse_impl(tensor);
  visit(impl->indices());
  visit(impl->values());
}

// Returns a sparse tensor like another, of replaced indices and values.
template <typename Replace>
Tensor map_parts(const Tensor& tensor, Replace replace) {
  auto* impl = at::sparse::get_sparse_impl(tensor);
  Tensor indices = replace(impl->indices()), values = replace(impl->values());
  return at::_sparse_coo_tensor_with_dims_and_tensors(
      impl->sparse_dim(), impl->dense_dim(), impl->sizes(), indices, values,
      values.options().layout(at::kSparse), impl->coalesced());
}

// Returns an alias for kernels. It does not own the memory: as on other devices, whoever launches
// a kernel may free its operands at once.
inline Tensor kernel_operand(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_sparse()) return map_parts(tensor, kernel_operand);
  return over_memory(tensor, tensor.numel() ? kernel_view(extent_of(tensor).start) : nullptr);
}

// The same for a tensor of the host, whose pinned memory has a second mapping for kernels.
inline Tensor host_operand(const Tensor& tensor) {
  return over_memory(tensor, PinnedMemory::get().kernel_view(extent_of(tensor).start));
}

inline Tensor meta_of(const Tensor& tensor) {
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

inline Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                              at::ScalarType dtype, Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

template <typename Visit>
void for_each_tensor(const IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor) visit(*tensor);
  }
}

// Returns `value` with each tensor replaced; values of other types as they are.
template <typename Replace>
IValue map_tensors(const IValue& value, Replace replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> replaced;
    for (const Tensor& tensor : value.toTensorVector()) replaced.push_back(replace(tensor));
    return replaced;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> replaced;
    for (const auto& tensor : value.toOptionalTensorVector())
      replaced.push_back(tensor ? std::optional<Tensor>(replace(*tensor)) : std::nullopt);
    return replaced;
  }
  return value;
}

inline bool is_device_sim(const IValue& value) {
  return value.isDevice() && value.toDevice().type() == kSim;
}

}  // namespace sim
