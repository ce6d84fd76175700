// What convolutions through either of cuDNN's APIs share: one handle a module, errors, element types, and the way of a
// filter gradient of bf16 or fp16 operands. That is fp32, which cuDNN writes from fp32 only: it is computed in the
// operands' type at the start of the workspace and widened into (or added to) its place.
#pragma once

#include "plan_tables.h"

#include <cudnn.h>

void check_cudnn(cudnnStatus_t status, const char* what);
cudnnDataType_t data_type_of(int64_t type);  // of MbcType

// A handle takes device memory and a stream at a time; one serves all that the launches of a module call in turn.
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

// The module's handle, made when the first library asks.
std::shared_ptr<CudnnHandle> cudnn_handle(Shared& shared);

// The detour of one filter gradient through the workspace; `elements` is 0 where none is needed.
struct Widening {
  int64_t type;
  int64_t elements;
  int64_t bytes;  // at the start of the workspace

  static Widening of(bool backward_filter, int64_t type, int64_t elements);
  // From the start of the workspace into the gradient; `accumulate` adds.
  void run(const void* workspace, void* gradient, bool accumulate, cudaStream_t stream) const;
};
