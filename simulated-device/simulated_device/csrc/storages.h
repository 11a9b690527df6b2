// Operators on storages and shapes, which run no kernel.
#pragma once

#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "device.h"
#include "operands.h"

namespace sim {

inline Tensor empty_memory_format(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                                  std::optional<at::Layout>, std::optional<Device> device,
                                  std::optional<bool> pin_memory,
                                  std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(sizes, &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                            std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<Device> device, std::optional<bool>) {
  Device chosen(kSim, index_or_current(c10::device_or_default(device)));
  return empty_on_device(sizes, strides, c10::dtype_or_default(dtype), chosen);
}

inline void grow_storage(const Tensor& tensor, size_t bytes) {
  if (tensor.numel() && bytes > tensor.storage().nbytes())
    resize_bytes(*tensor.storage().unsafeGetStorageImpl(), bytes);
}

inline const Tensor& resize_(const Tensor& self, c10::IntArrayRef sizes,
                             std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {
    impl->set_sizes_contiguous(sizes);
    grow_storage(self, at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(),
                                                                  self.storage_offset()));
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

inline Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset,
                           c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  at::native::checkSetStorage(self, source, offset, sizes, strides);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (strides.data()) impl->set_sizes_and_strides(sizes, strides);
  else impl->set_sizes_contiguous(sizes);
  grow_storage(self, at::detail::computeStorageNbytes(self.sizes(), self.strides(),
                                                      self.itemsize(), offset));
  return self;
}

inline Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, source, 0, {numel}, {});
}

inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

inline Tensor& set_empty(Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator.allocate(0),
                       &device_allocator, true);
  return set_storage(self, storage, 0, {0}, {});
}

inline bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().is_alias_of(other.storage()) &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
         self.strides() == other.strides();
}

inline Tensor as_strided(const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

inline void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator.recordStream(self.storage().data_ptr(), stream);
}

// Allows `parameter.data = tensor` where one is on the host, as CUDA does.
inline bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  auto is_dense = [](const Tensor& tensor) {
    return tensor.layout() == at::kStrided && (is_sim(tensor) || tensor.is_cpu());
  };
  return is_dense(self) && is_dense(from);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", at::native::view);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_empty);
  library.impl("is_set_to", is_set_to);
  library.impl("record_stream", record_stream);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

}  // namespace sim
