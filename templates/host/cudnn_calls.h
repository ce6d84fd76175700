// Common parts of convolutions through cuDNN's two APIs: one handle for each module, errors, element types, and the
// detour of a filter gradient of bf16 or fp16 operands. Such a gradient is stored in fp32, which cuDNN writes from fp32
// operands only. It is computed in the operands' type at the start of the workspace, then widened and written or added.
#pragma once

#include "plan_tables.h"

#include <cudnn.h>

void check_cudnn(cudnnStatus_t status, const char* what);
cudnnDataType_t data_type_of(int64_t type);  // `type` is an MbcType

// A handle uses device memory and one stream at a time; one is enough, because a module's launches run in turn.
class CudnnHandle {
 public:
  CudnnHandle() { check_cudnn(cudnnCreate(&handle_), "create handle"); }
  ~CudnnHandle() { cudnnDestroy(handle_); }
  CudnnHandle(const CudnnHandle&) = delete;
  CudnnHandle& operator=(const CudnnHandle&) = delete;

  const cudnnHandle_t& get() const { return handle_; }
  void use(cudaStream_t stream);

 private:
  cudnnHandle_t handle_ = nullptr;
  cudaStream_t stream_ = nullptr;
  bool stream_set_ = false;
};

// The module's handle, created when the first library needs it.
std::shared_ptr<CudnnHandle> cudnn_handle(Shared& shared);

// The detour of a filter gradient through the workspace; `elements` is 0 if there is no detour.
struct Widening {
  int64_t type;
  int64_t elements;
  int64_t bytes;  // at the start of the workspace

  static Widening of(bool backward_filter, int64_t type, int64_t elements);
  // Widens the start of the workspace into the gradient; `accumulate` adds.
  void run(const void* workspace, void* gradient, bool accumulate, cudaStream_t stream) const;
};
