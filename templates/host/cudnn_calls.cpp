// See cudnn_calls.h.

#include "cudnn_calls.h"

#include "mbc_types.h"

extern "C" const char* mbc_widen(const MbcCall& call);  // widen.cu

size_t cudnn_version() { return cudnnGetVersion(); }

void check_cudnn(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  char detail[512] = "";
  cudnnGetLastErrorString(detail, sizeof detail);
  throw Failure(std::string("cuDNN ") + what + ": " + cudnnGetErrorString(status) +
                (detail[0] != '\0' ? std::string(" (") + detail + ")" : ""));
}

cudnnDataType_t data_type_of(int64_t type) {
  if (type == MBC_BF16) return CUDNN_DATA_BFLOAT16;
  return type == MBC_FP16 ? CUDNN_DATA_HALF : CUDNN_DATA_FLOAT;
}

void CudnnHandle::use(cudaStream_t stream) {
  if (stream_ == stream && stream_set_) return;
  check_cudnn(cudnnSetStream(handle_, stream), "set stream");
  stream_ = stream;
  stream_set_ = true;
}

std::shared_ptr<CudnnHandle> cudnn_handle(Shared& shared) {
  if (!shared.cudnn) shared.cudnn = std::make_shared<CudnnHandle>();
  return shared.cudnn;
}

Widening Widening::of(bool backward_filter, int64_t type, int64_t elements) {
  constexpr int64_t ALIGNMENT = 256;
  if (!backward_filter || type == MBC_FP32) return {type, 0, 0};
  return {type, elements, (elements * 2 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT};
}

void Widening::run(const void* workspace, void* gradient, bool accumulate, cudaStream_t stream) const {
  void* const pointers[] = {const_cast<void*>(workspace), gradient};
  const int64_t integers[] = {type, elements, accumulate};
  if (const char* text = mbc_widen({pointers, integers, nullptr, stream, 2, 3})) throw Failure(text);
}
