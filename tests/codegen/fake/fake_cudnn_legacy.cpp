// A recording fake of cuDNN's legacy convolutions: running one logs what its descriptors describe. Algorithms are
// supported and take workspace by the simple rules of `workspace_of`.
#include "fake.h"

#include <cudnn.h>

#include <array>

struct FakeTensor {
  cudnnDataType_t type;
  std::array<int, 4> sizes, strides;
};
struct FakeFilter {
  cudnnDataType_t type;
  cudnnTensorFormat_t format;
  std::array<int, 4> sizes;
};
struct FakeConvolution {
  std::array<int, 2> pad, stride, dilation;
  int groups = 1;
  cudnnMathType_t math = CUDNN_DEFAULT_MATH;
};

namespace {

int descriptors = 0;

template <typename T>
cudnnStatus_t create(T** descriptor) {
  *descriptor = new T();
  ++descriptors;
  return CUDNN_STATUS_SUCCESS;
}

template <typename T>
cudnnStatus_t destroy(T* descriptor) {
  delete descriptor;
  --descriptors;
  return CUDNN_STATUS_SUCCESS;
}

// One call in the terms of the forward pass.
struct Described {
  const char* pass;
  const FakeTensor& image;
  const FakeFilter& filter;
  const FakeTensor& result;
  const FakeConvolution& convolution;
  int algorithm;
};

// Algorithms from 8 on do not exist, 3 is not supported, those from 4 on take no strides and no channels last; an
// algorithm takes 100 bytes times its number and the rows, and a byte more where tensor cores are allowed.
cudnnStatus_t workspace_of(const Described& d, size_t* bytes) {
  const auto& [n, c, h, w] = d.image.sizes;
  const FakeConvolution& a = d.convolution;
  const bool last = d.filter.format == CUDNN_TENSOR_NHWC;
  const std::array<int, 4> strides = last ? std::array<int, 4>{h * w * c, 1, w * c, c} : std::array<int, 4>{c * h * w, h * w, w, 1};
  if (d.image.strides != strides || d.image.type != d.filter.type || d.image.type != d.result.type)
    return CUDNN_STATUS_BAD_PARAM;
  if (n != d.result.sizes[0] || c != d.filter.sizes[1] * a.groups || d.filter.sizes[0] != d.result.sizes[1])
    return CUDNN_STATUS_BAD_PARAM;
  for (size_t i = 0; i < 2; ++i) {
    const int span = a.dilation[i] * (d.filter.sizes[2 + i] - 1) + 1;
    if ((d.image.sizes[2 + i] + 2 * a.pad[i] - span) / a.stride[i] + 1 != d.result.sizes[2 + i])
      return CUDNN_STATUS_BAD_PARAM;
  }
  *bytes = 0;
  if (fake_has_everything()) return CUDNN_STATUS_SUCCESS;
  if (d.algorithm < 0 || d.algorithm > 7 || d.algorithm == 3) return CUDNN_STATUS_NOT_SUPPORTED;
  if (d.algorithm > 3 && (last || a.stride[0] != 1 || a.stride[1] != 1)) return CUDNN_STATUS_NOT_SUPPORTED;
  *bytes = static_cast<size_t>(100 * d.algorithm * n + (d.algorithm > 0 && a.math != CUDNN_FMA_MATH));
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t run(cudnnHandle_t handle, const Described& d, const void* image, const void* filter, const void* result,
                  const void* alpha, const void* beta, const void* workspace, size_t workspace_bytes) {
  size_t needed = 0;
  const cudnnStatus_t status = workspace_of(d, &needed);
  if (status != CUDNN_STATUS_SUCCESS) return status;
  if (workspace_bytes < needed || (needed > 0 && workspace == nullptr)) return CUDNN_STATUS_BAD_PARAM;
  if (*static_cast<const float*>(alpha) != 1.0f) return CUDNN_STATUS_BAD_PARAM;
  std::ostringstream& out = fake_launch("cudnn_legacy", handle->stream);
  out << " pass=" << d.pass << " algorithm=" << d.algorithm << " math=" << d.convolution.math
      << " format=" << d.filter.format << " groups=" << d.convolution.groups << " workspace_bytes=" << workspace_bytes;
  fake_list(out, "offsets", std::initializer_list<int64_t>{fake_offset(image), fake_offset(filter), fake_offset(result)});
  if (workspace != nullptr) out << " workspace=" << fake_offset(workspace);
  fake_list(out, "image", d.image.sizes);
  fake_list(out, "filter", d.filter.sizes);
  fake_list(out, "result", d.result.sizes);
  fake_list(out, "strides", d.image.strides);
  fake_list(out, "types", std::initializer_list<int>{d.image.type, d.filter.type, d.result.type});
  fake_list(out, "pad", d.convolution.pad);
  fake_list(out, "stride", d.convolution.stride);
  fake_list(out, "dilation", d.convolution.dilation);
  out << " beta=" << *static_cast<const float*>(beta);
  fake_end();
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace

int fake_cudnn_descriptors() { return descriptors; }

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* made) { return create(made); }
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t made) { return destroy(made); }
cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t* made) { return create(made); }
cudnnStatus_t cudnnDestroyFilterDescriptor(cudnnFilterDescriptor_t made) { return destroy(made); }
cudnnStatus_t cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t* made) { return create(made); }
cudnnStatus_t cudnnDestroyConvolutionDescriptor(cudnnConvolutionDescriptor_t made) { return destroy(made); }

cudnnStatus_t cudnnSetTensor4dDescriptorEx(cudnnTensorDescriptor_t made, cudnnDataType_t type, int n, int c, int h,
                                           int w, int n_stride, int c_stride, int h_stride, int w_stride) {
  *made = {type, {n, c, h, w}, {n_stride, c_stride, h_stride, w_stride}};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetFilter4dDescriptor(cudnnFilterDescriptor_t made, cudnnDataType_t type, cudnnTensorFormat_t format,
                                         int k, int c, int h, int w) {
  *made = {type, format, {k, c, h, w}};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolution2dDescriptor(cudnnConvolutionDescriptor_t made, int pad_h, int pad_w, int stride_h,
                                              int stride_w, int dilation_h, int dilation_w, cudnnConvolutionMode_t mode,
                                              cudnnDataType_t compute) {
  if (mode != CUDNN_CROSS_CORRELATION || compute != CUDNN_DATA_FLOAT) return CUDNN_STATUS_BAD_PARAM;
  made->pad = {pad_h, pad_w};
  made->stride = {stride_h, stride_w};
  made->dilation = {dilation_h, dilation_w};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionGroupCount(cudnnConvolutionDescriptor_t made, int groups) {
  made->groups = groups;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t made, cudnnMathType_t math) {
  made->math = math;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(cudnnHandle_t, const cudnnTensorDescriptor_t x,
                                                      const cudnnFilterDescriptor_t w,
                                                      const cudnnConvolutionDescriptor_t convolution,
                                                      const cudnnTensorDescriptor_t y, cudnnConvolutionFwdAlgo_t algo,
                                                      size_t* bytes) {
  return workspace_of({"forward", *x, *w, *y, *convolution, algo}, bytes);
}
cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(cudnnHandle_t, const cudnnFilterDescriptor_t w,
                                                           const cudnnTensorDescriptor_t dy,
                                                           const cudnnConvolutionDescriptor_t convolution,
                                                           const cudnnTensorDescriptor_t dx,
                                                           cudnnConvolutionBwdDataAlgo_t algo, size_t* bytes) {
  return workspace_of({"backward_data", *dx, *w, *dy, *convolution, algo}, bytes);
}
cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(cudnnHandle_t, const cudnnTensorDescriptor_t x,
                                                             const cudnnTensorDescriptor_t dy,
                                                             const cudnnConvolutionDescriptor_t convolution,
                                                             const cudnnFilterDescriptor_t dw,
                                                             cudnnConvolutionBwdFilterAlgo_t algo, size_t* bytes) {
  return workspace_of({"backward_filter", *x, *dw, *dy, *convolution, algo}, bytes);
}

cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t handle, const void* alpha, const cudnnTensorDescriptor_t image,
                                      const void* x, const cudnnFilterDescriptor_t filter, const void* w,
                                      const cudnnConvolutionDescriptor_t convolution, cudnnConvolutionFwdAlgo_t algo,
                                      void* workspace, size_t bytes, const void* beta,
                                      const cudnnTensorDescriptor_t result, void* y) {
  return run(handle, {"forward", *image, *filter, *result, *convolution, algo}, x, w, y, alpha, beta, workspace, bytes);
}
cudnnStatus_t cudnnConvolutionBackwardData(cudnnHandle_t handle, const void* alpha,
                                           const cudnnFilterDescriptor_t filter, const void* w,
                                           const cudnnTensorDescriptor_t result, const void* dy,
                                           const cudnnConvolutionDescriptor_t convolution,
                                           cudnnConvolutionBwdDataAlgo_t algo, void* workspace, size_t bytes,
                                           const void* beta, const cudnnTensorDescriptor_t image, void* dx) {
  return run(handle, {"backward_data", *image, *filter, *result, *convolution, algo}, dx, w, dy, alpha, beta, workspace,
             bytes);
}
cudnnStatus_t cudnnConvolutionBackwardFilter(cudnnHandle_t handle, const void* alpha,
                                             const cudnnTensorDescriptor_t image, const void* x,
                                             const cudnnTensorDescriptor_t result, const void* dy,
                                             const cudnnConvolutionDescriptor_t convolution,
                                             cudnnConvolutionBwdFilterAlgo_t algo, void* workspace, size_t bytes,
                                             const void* beta, const cudnnFilterDescriptor_t filter, void* dw) {
  return run(handle, {"backward_filter", *image, *filter, *result, *convolution, algo}, x, dw, dy, alpha, beta,
             workspace, bytes);
}
