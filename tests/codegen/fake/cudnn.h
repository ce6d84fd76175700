// As much of cuDNN as generated host code uses, values as in cuDNN 9: its backend API (fake_cudnn.cpp) and the
// convolutions of its legacy API (fake_cudnn_legacy.cpp).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

struct FakeCudnnHandle {
  cudaStream_t stream = nullptr;
};
struct FakeDescriptor;
using cudnnHandle_t = FakeCudnnHandle*;
using cudnnBackendDescriptor_t = void*;

enum cudnnStatus_t { CUDNN_STATUS_SUCCESS = 0, CUDNN_STATUS_BAD_PARAM = 2000, CUDNN_STATUS_NOT_SUPPORTED = 3000 };
enum cudnnDataType_t { CUDNN_DATA_FLOAT = 0, CUDNN_DATA_HALF = 2, CUDNN_DATA_BFLOAT16 = 9 };
enum cudnnConvolutionMode_t { CUDNN_CROSS_CORRELATION = 1 };
enum cudnnGenStatsMode_t { CUDNN_GENSTATS_SUM_SQSUM = 0 };
enum cudnnMathType_t { CUDNN_DEFAULT_MATH = 0, CUDNN_TENSOR_OP_MATH = 1, CUDNN_FMA_MATH = 3 };
enum cudnnTensorFormat_t { CUDNN_TENSOR_NCHW = 0, CUDNN_TENSOR_NHWC = 1 };
enum cudnnConvolutionFwdAlgo_t { CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM = 0 };
enum cudnnConvolutionBwdDataAlgo_t { CUDNN_CONVOLUTION_BWD_DATA_ALGO_0 = 0 };
enum cudnnConvolutionBwdFilterAlgo_t { CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0 = 0 };
enum cudnnBackendHeurMode_t { CUDNN_HEUR_MODE_FALLBACK = 2, CUDNN_HEUR_MODE_A = 3 };
enum cudnnBackendKnobType_t { CUDNN_KNOB_TYPE_COUNTS = 44 };

enum cudnnBackendNumericalNote_t {
  CUDNN_NUMERICAL_NOTE_TENSOR_CORE = 0,
  CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS = 1,
  CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION = 2,
  CUDNN_NUMERICAL_NOTE_FFT = 3,
  CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC = 4,
  CUDNN_NUMERICAL_NOTE_WINOGRAD = 5,
  CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4 = 6,
  CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6 = 7,
  CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13 = 8,
  CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP = 9,
  CUDNN_NUMERICAL_NOTE_TYPE_COUNT = 10,
};
enum cudnnBackendBehaviorNote_t {
  CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION = 0,
  CUDNN_BEHAVIOR_NOTE_TYPE_COUNT = 5,
};

enum cudnnBackendDescriptorType_t {
  CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR = 1,
  CUDNN_BACKEND_ENGINE_DESCRIPTOR = 2,
  CUDNN_BACKEND_ENGINECFG_DESCRIPTOR = 3,
  CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR = 4,
  CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR = 5,
  CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR = 8,
  CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR = 10,
  CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR = 11,
  CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR = 12,
  CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR = 14,
  CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR = 15,
  CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR = 16,
  CUDNN_BACKEND_TENSOR_DESCRIPTOR = 17,
};

enum cudnnBackendAttributeType_t {
  CUDNN_TYPE_HANDLE,
  CUDNN_TYPE_DATA_TYPE,
  CUDNN_TYPE_INT64,
  CUDNN_TYPE_FLOAT,
  CUDNN_TYPE_VOID_PTR,
  CUDNN_TYPE_CONVOLUTION_MODE,
  CUDNN_TYPE_HEUR_MODE,
  CUDNN_TYPE_KNOB_TYPE,
  CUDNN_TYPE_NUMERICAL_NOTE,
  CUDNN_TYPE_BEHAVIOR_NOTE,
  CUDNN_TYPE_GENSTATS_MODE,
  CUDNN_TYPE_BACKEND_DESCRIPTOR,
};

enum cudnnBackendAttributeName_t {
  CUDNN_ATTR_CONVOLUTION_COMP_TYPE,
  CUDNN_ATTR_CONVOLUTION_CONV_MODE,
  CUDNN_ATTR_CONVOLUTION_DILATIONS,
  CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES,
  CUDNN_ATTR_CONVOLUTION_POST_PADDINGS,
  CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS,
  CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS,
  CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE,
  CUDNN_ATTR_ENGINE_GLOBAL_INDEX,
  CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
  CUDNN_ATTR_ENGINE_OPERATION_GRAPH,
  CUDNN_ATTR_ENGINECFG_ENGINE,
  CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
  CUDNN_ATTR_ENGINEHEUR_MODE,
  CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH,
  CUDNN_ATTR_ENGINEHEUR_RESULTS,
  CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
  CUDNN_ATTR_EXECUTION_PLAN_HANDLE,
  CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
  CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE,
  CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
  CUDNN_ATTR_OPERATION_GENSTATS_MATH_PREC,
  CUDNN_ATTR_OPERATION_GENSTATS_MODE,
  CUDNN_ATTR_OPERATION_GENSTATS_SQSUMDESC,
  CUDNN_ATTR_OPERATION_GENSTATS_SUMDESC,
  CUDNN_ATTR_OPERATION_GENSTATS_XDESC,
  CUDNN_ATTR_OPERATIONGRAPH_HANDLE,
  CUDNN_ATTR_OPERATIONGRAPH_OPS,
  CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT,
  CUDNN_ATTR_TENSOR_DATA_TYPE,
  CUDNN_ATTR_TENSOR_DIMENSIONS,
  CUDNN_ATTR_TENSOR_STRIDES,
  CUDNN_ATTR_TENSOR_UNIQUE_ID,
  CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
  CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS,
  CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
};

struct FakeTensor;
struct FakeFilter;
struct FakeConvolution;
using cudnnTensorDescriptor_t = FakeTensor*;
using cudnnFilterDescriptor_t = FakeFilter*;
using cudnnConvolutionDescriptor_t = FakeConvolution*;

#pragma GCC visibility push(default)
extern "C" {
size_t cudnnGetVersion();
const char* cudnnGetErrorString(cudnnStatus_t);
void cudnnGetLastErrorString(char*, size_t);
cudnnStatus_t cudnnCreate(cudnnHandle_t*);
cudnnStatus_t cudnnDestroy(cudnnHandle_t);
cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t);
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t*);
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t);
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t);
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t,
                                       cudnnBackendAttributeType_t, int64_t, const void*);
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const, cudnnBackendAttributeName_t,
                                       cudnnBackendAttributeType_t, int64_t, int64_t*, void*);
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t);

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t*);
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t);
cudnnStatus_t cudnnSetTensor4dDescriptorEx(cudnnTensorDescriptor_t, cudnnDataType_t, int n, int c, int h, int w,
                                           int n_stride, int c_stride, int h_stride, int w_stride);
cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t*);
cudnnStatus_t cudnnDestroyFilterDescriptor(cudnnFilterDescriptor_t);
cudnnStatus_t cudnnSetFilter4dDescriptor(cudnnFilterDescriptor_t, cudnnDataType_t, cudnnTensorFormat_t, int k, int c,
                                         int h, int w);
cudnnStatus_t cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t*);
cudnnStatus_t cudnnDestroyConvolutionDescriptor(cudnnConvolutionDescriptor_t);
cudnnStatus_t cudnnSetConvolution2dDescriptor(cudnnConvolutionDescriptor_t, int pad_h, int pad_w, int stride_h,
                                              int stride_w, int dilation_h, int dilation_w, cudnnConvolutionMode_t,
                                              cudnnDataType_t);
cudnnStatus_t cudnnSetConvolutionGroupCount(cudnnConvolutionDescriptor_t, int);
cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t, cudnnMathType_t);
cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(cudnnHandle_t, const cudnnTensorDescriptor_t x,
                                                      const cudnnFilterDescriptor_t w,
                                                      const cudnnConvolutionDescriptor_t,
                                                      const cudnnTensorDescriptor_t y, cudnnConvolutionFwdAlgo_t,
                                                      size_t*);
cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(cudnnHandle_t, const cudnnFilterDescriptor_t w,
                                                           const cudnnTensorDescriptor_t dy,
                                                           const cudnnConvolutionDescriptor_t,
                                                           const cudnnTensorDescriptor_t dx,
                                                           cudnnConvolutionBwdDataAlgo_t, size_t*);
cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(cudnnHandle_t, const cudnnTensorDescriptor_t x,
                                                             const cudnnTensorDescriptor_t dy,
                                                             const cudnnConvolutionDescriptor_t,
                                                             const cudnnFilterDescriptor_t dw,
                                                             cudnnConvolutionBwdFilterAlgo_t, size_t*);
cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t, const void* alpha, const cudnnTensorDescriptor_t, const void* x,
                                      const cudnnFilterDescriptor_t, const void* w, const cudnnConvolutionDescriptor_t,
                                      cudnnConvolutionFwdAlgo_t, void* workspace, size_t, const void* beta,
                                      const cudnnTensorDescriptor_t, void* y);
cudnnStatus_t cudnnConvolutionBackwardData(cudnnHandle_t, const void* alpha, const cudnnFilterDescriptor_t,
                                           const void* w, const cudnnTensorDescriptor_t, const void* dy,
                                           const cudnnConvolutionDescriptor_t, cudnnConvolutionBwdDataAlgo_t,
                                           void* workspace, size_t, const void* beta, const cudnnTensorDescriptor_t,
                                           void* dx);
cudnnStatus_t cudnnConvolutionBackwardFilter(cudnnHandle_t, const void* alpha, const cudnnTensorDescriptor_t,
                                             const void* x, const cudnnTensorDescriptor_t, const void* dy,
                                             const cudnnConvolutionDescriptor_t, cudnnConvolutionBwdFilterAlgo_t,
                                             void* workspace, size_t, const void* beta, const cudnnFilterDescriptor_t,
                                             void* dw);
// Not cuDNN's: how many exist, so that a test sees that all are destroyed.
int fake_cudnn_handles();
int fake_cudnn_descriptors();
}
#pragma GCC visibility pop
