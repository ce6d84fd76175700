// Convolutions through cuDNN's legacy API, which has FFT and Winograd: descriptors for each distinct row, created once.
//
// Accesses of a launch: forward x, w, y; data gradient dy, w, dx; filter gradient x, dy, dw; then a workspace, if any.

#include "cudnn_calls.h"
#include "mbc_types.h"
#include "cudnn_legacy_arguments.h"

#include <climits>
#include <map>
#include <utility>
#include <vector>

namespace {

enum Pass : int64_t { FORWARD = 0, BACKWARD_DATA = 1, BACKWARD_FILTER = 2 };

template <typename T, cudnnStatus_t (*create)(T*), cudnnStatus_t (*destroy)(T)>
class Owned {
 public:
  Owned() { check_cudnn(create(&raw_), "create descriptor"); }
  Owned(Owned&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (raw_ != nullptr) destroy(raw_);
  }
  T get() const { return raw_; }

 private:
  T raw_ = nullptr;
};

using Tensor = Owned<cudnnTensorDescriptor_t, cudnnCreateTensorDescriptor, cudnnDestroyTensorDescriptor>;
using Filter = Owned<cudnnFilterDescriptor_t, cudnnCreateFilterDescriptor, cudnnDestroyFilterDescriptor>;
using Convolution =
    Owned<cudnnConvolutionDescriptor_t, cudnnCreateConvolutionDescriptor, cudnnDestroyConvolutionDescriptor>;

int as_int(int64_t value) {
  if (value < 0 || value > INT_MAX) throw Failure("cuDNN's legacy API does not take a size of " + std::to_string(value));
  return static_cast<int>(value);
}

// Strides rather than a format: with one pixel or one channel the two formats are equal.
Tensor tensor(const LegacyRow& row, int64_t channels, int64_t height, int64_t width) {
  const bool last = row.layout == MBC_CHANNELS_LAST;
  Tensor descriptor;
  check_cudnn(cudnnSetTensor4dDescriptorEx(descriptor.get(), data_type_of(row.type), as_int(row.rows), as_int(channels),
                                           as_int(height), as_int(width), as_int(channels * height * width),
                                           as_int(last ? 1 : height * width), as_int(last ? width * channels : width),
                                           as_int(last ? channels : 1)),
              "tensor");
  return descriptor;
}

Filter filter(const LegacyRow& row) {
  Filter descriptor;
  check_cudnn(cudnnSetFilter4dDescriptor(
                  descriptor.get(), data_type_of(row.type),
                  row.layout == MBC_CHANNELS_LAST ? CUDNN_TENSOR_NHWC : CUDNN_TENSOR_NCHW, as_int(row.filters),
                  as_int(row.channels / row.groups), as_int(row.kernel_height), as_int(row.kernel_width)),
              "filter");
  return descriptor;
}

Convolution convolution(const LegacyRow& row) {
  Convolution descriptor;
  check_cudnn(cudnnSetConvolution2dDescriptor(descriptor.get(), as_int(row.pad_height), as_int(row.pad_width),
                                              as_int(row.stride_height), as_int(row.stride_width),
                                              as_int(row.dilation_height), as_int(row.dilation_width),
                                              CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT),
              "convolution");
  check_cudnn(cudnnSetConvolutionGroupCount(descriptor.get(), as_int(row.groups)), "groups");
  check_cudnn(cudnnSetConvolutionMathType(descriptor.get(), static_cast<cudnnMathType_t>(row.math)), "math type");
  return descriptor;
}

// One convolution, ready to run: `image` is x or dx, `weight` w or dw, `result` y or dy.
struct Prepared {
  explicit Prepared(const LegacyRow& the_row)
      : row(the_row),
        image(tensor(row, row.channels, row.height, row.width)),
        weight(filter(row)),
        result(tensor(row, row.filters, row.out_height, row.out_width)),
        shape(convolution(row)),
        widening(Widening::of(row.pass == BACKWARD_FILTER, row.type,
                              row.filters * (row.channels / row.groups) * row.kernel_height * row.kernel_width)) {}

  // The bytes of the workspace that the algorithm may use.
  int64_t budget() const { return row.workspace_bytes - widening.bytes; }

  LegacyRow row;
  Tensor image;
  Filter weight;
  Tensor result;
  Convolution shape;
  Widening widening;
};

class CudnnLegacy : public Library {
 public:
  explicit CudnnLegacy(std::shared_ptr<CudnnHandle> handle) : handle_(std::move(handle)) {}

  int prepare(const int64_t* integers, int64_t integer_count, const int64_t*, int64_t) override {
    std::vector<int64_t> key(integers, integers + integer_count);
    const auto entry = numbers_.find(key);
    if (entry != numbers_.end()) return entry->second;
    Prepared prepared(*reinterpret_cast<const LegacyRow*>(integers));
    if (prepared.budget() < 0) throw Failure("the planned workspace is too small for the filter gradient");
    const auto needed = static_cast<int64_t>(workspace_bytes(prepared));
    if (needed > prepared.budget())
      throw Failure("cuDNN's legacy algorithm " + std::to_string(prepared.row.algorithm) + " needs " +
                    std::to_string(needed) + " bytes of workspace here, the plan has " +
                    std::to_string(prepared.budget()) + ": compile the source again with this cuDNN");
    prepared_.push_back(std::move(prepared));
    const int number = static_cast<int>(prepared_.size()) - 1;
    numbers_.emplace(std::move(key), number);
    return number;
  }

  void run(int number, const MbcCall& call) override {
    const Prepared& p = prepared_[static_cast<size_t>(number)];
    const cudnnHandle_t handle = handle_->get();
    handle_->use(call.stream);
    void* const* const at = call.pointers;
    char* const workspace = p.row.workspace_bytes > 0 ? static_cast<char*>(at[3]) : nullptr;
    char* const spare = p.budget() > 0 ? workspace + p.widening.bytes : nullptr;
    const auto size = static_cast<size_t>(p.budget());
    const bool widened = p.widening.elements > 0;
    const float one = 1.0f, beta = p.row.accumulate != 0 && !widened ? 1.0f : 0.0f;
    if (p.row.pass == FORWARD) {
      check_cudnn(cudnnConvolutionForward(handle, &one, p.image.get(), at[0], p.weight.get(), at[1], p.shape.get(),
                                          static_cast<cudnnConvolutionFwdAlgo_t>(p.row.algorithm), spare, size, &beta,
                                          p.result.get(), at[2]),
                  "forward");
    } else if (p.row.pass == BACKWARD_DATA) {
      check_cudnn(cudnnConvolutionBackwardData(handle, &one, p.weight.get(), at[1], p.result.get(), at[0],
                                               p.shape.get(),
                                               static_cast<cudnnConvolutionBwdDataAlgo_t>(p.row.algorithm), spare,
                                               size, &beta, p.image.get(), at[2]),
                  "backward data");
    } else {
      check_cudnn(cudnnConvolutionBackwardFilter(handle, &one, p.image.get(), at[0], p.result.get(), at[1],
                                                 p.shape.get(),
                                                 static_cast<cudnnConvolutionBwdFilterAlgo_t>(p.row.algorithm), spare,
                                                 size, &beta, p.weight.get(), widened ? workspace : at[2]),
                  "backward filter");
      if (widened) p.widening.run(workspace, at[2], p.row.accumulate != 0, call.stream);
    }
  }

 private:
  // The workspace that the algorithm needs on this GPU with this cuDNN.
  size_t workspace_bytes(const Prepared& p) const {
    const cudnnHandle_t handle = handle_->get();
    size_t bytes = 0;
    if (p.row.pass == FORWARD)
      check_cudnn(cudnnGetConvolutionForwardWorkspaceSize(
                      handle, p.image.get(), p.weight.get(), p.shape.get(), p.result.get(),
                      static_cast<cudnnConvolutionFwdAlgo_t>(p.row.algorithm), &bytes),
                  "forward workspace");
    else if (p.row.pass == BACKWARD_DATA)
      check_cudnn(cudnnGetConvolutionBackwardDataWorkspaceSize(
                      handle, p.weight.get(), p.result.get(), p.shape.get(), p.image.get(),
                      static_cast<cudnnConvolutionBwdDataAlgo_t>(p.row.algorithm), &bytes),
                  "backward data workspace");
    else
      check_cudnn(cudnnGetConvolutionBackwardFilterWorkspaceSize(
                      handle, p.image.get(), p.result.get(), p.shape.get(), p.weight.get(),
                      static_cast<cudnnConvolutionBwdFilterAlgo_t>(p.row.algorithm), &bytes),
                  "backward filter workspace");
    return bytes;
  }

  std::shared_ptr<CudnnHandle> handle_;
  std::vector<Prepared> prepared_;
  std::map<std::vector<int64_t>, int> numbers_;
};

}  // namespace

std::unique_ptr<Library> open_cudnn_legacy(Shared& shared) { return std::make_unique<CudnnLegacy>(cudnn_handle(shared)); }
