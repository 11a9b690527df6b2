// Sparse tensors (COO): indices and values are tensors of the device.
//
// torch's functions for their structure are those of every device. What computes runs on the CPU
// over the same memory; how many elements a result has depends on values, so the host waits.
#pragma once

#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_to_dense_native.h>
#include <ATen/ops/_to_sparse_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/zero_native.h>
#include <torch/library.h>

#include "kernels.h"

namespace sim {

inline Tensor& copy_sparse(Tensor& self, const Tensor& source, bool non_blocking) {
  TORCH_CHECK(self.is_sparse() && source.is_sparse(),
              "copy_() between dense and sparse Tensors is not implemented!");
  return at::native::copy_sparse_(self, source, non_blocking);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  library.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  library.impl("_sparse_coo_tensor_with_dims_and_tensors",
               at::native::new_with_dims_and_tensor_sparse_symint);
  library.impl("empty.memory_format", at::native::empty_sparse_symint);
  library.impl("empty_like", at::native::empty_like_sparse_coo);
  library.impl("sparse_resize_", at::native::sparse_resize_);
  library.impl("sparse_resize_and_clear_", at::native::sparse_resize_and_clear_);
  library.impl("sparse_dim", at::native::sparse_dim_sparse);
  library.impl("dense_dim", at::native::dense_dim_sparse);
  library.impl("_nnz", at::native::_nnz_sparse);
  library.impl("_indices", at::native::_indices_sparse);
  library.impl("_values", at::native::_values_sparse);
  library.impl("indices", at::native::indices_sparse);
  library.impl("values", at::native::values_sparse);
  library.impl("is_coalesced", at::native::is_coalesced_sparse);
  library.impl("_coalesced_", at::native::_coalesced_sparse_);
  library.impl("copy_", copy_sparse);
  library.impl("copy_sparse_to_sparse_", at::native::copy_sparse_);
  library.impl("clone", at::native::clone_sparse);
  library.impl("zero_", at::native::zero_sparse_);
  library.impl("_to_dense", at::native::sparse_to_dense);

  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    if (name.name.starts_with("aten::") && op && op->hasSchema() &&
        has(c10::DispatchKey::SparseCPU) && !has(c10::DispatchKey::SparsePrivateUse1))
      library.impl(c10::toString(name).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

using ToSparse = Tensor(const Tensor&, std::optional<at::Layout>, at::OptionalIntArrayRef,
                        std::optional<int64_t>);
using ToSparseDim = Tensor(const Tensor&, int64_t);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_to_sparse", static_cast<ToSparse*>(at::native::dense_to_sparse));
  library.impl("_to_sparse.sparse_dim", static_cast<ToSparseDim*>(at::native::dense_to_sparse));
}

}  // namespace sim
