// A recording fake of cuDNN's backend API: descriptors are bags of attributes; executing a plan logs the convolution
// that its operation graph describes. The heuristics offer engines that tell the rules of admission apart.
#include "fake.h"

#include <cudnn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

namespace {

struct Bag {
  explicit Bag(cudnnBackendDescriptorType_t kind, bool ready = false) : type(kind), finalized(ready) {}

  cudnnBackendDescriptorType_t type;
  bool finalized;
  std::map<int, std::vector<char>> bytes;
  std::map<int, std::vector<std::shared_ptr<Bag>>> children;

  template <typename T>
  std::vector<T> values(int name) const {
    const auto found = bytes.find(name);
    if (found == bytes.end()) return {};
    std::vector<T> result(found->second.size() / sizeof(T));
    std::memcpy(result.data(), found->second.data(), result.size() * sizeof(T));
    return result;
  }
  std::vector<int64_t> integers(int name) const { return values<int64_t>(name); }
  const Bag& child(int name) const { return *children.at(name).at(0); }
};

using Handle = std::shared_ptr<Bag>;

Handle& of(cudnnBackendDescriptor_t raw) { return *static_cast<Handle*>(raw); }

constexpr int64_t UNAFFORDABLE = int64_t{1} << 50;

struct Engine {
  int64_t number;
  std::vector<int> notes;
  int64_t workspace_bytes;
};

// In the order in which the heuristics offer them. No engine of the real library has such a number.
const std::vector<Engine>& engines() {
  static const std::vector<Engine> all = {
      {960, {CUDNN_NUMERICAL_NOTE_TENSOR_CORE}, UNAFFORDABLE},
      {961, {CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS}, 0},
      {962, {CUDNN_NUMERICAL_NOTE_FFT}, 0},
      {963, {CUDNN_NUMERICAL_NOTE_WINOGRAD}, 0},
      {964, {CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC}, 0},
      {965, {CUDNN_NUMERICAL_NOTE_TENSOR_CORE}, 128},
      {966, {CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP}, 0},
  };
  return all;
}

// A plan may name engines that were measured on a GPU: those are ordinary ones here.
const Engine* engine_of(int64_t number) {
  static const Engine measured = {0, {CUDNN_NUMERICAL_NOTE_TENSOR_CORE}, 0};
  for (const Engine& engine : engines())
    if (engine.number == number) return &engine;
  return number < 0 ? nullptr : &measured;
}

size_t size_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
      return 8;
    default:
      return 4;
  }
}

std::string last_error;
int handles = 0;

cudnnStatus_t refuse(const std::string& text) {
  last_error = text;
  return CUDNN_STATUS_BAD_PARAM;
}

// The parts of an operation, found by what they are rather than by name.
struct Parts {
  const Bag* image = nullptr;
  const Bag* filter = nullptr;
  const Bag* result = nullptr;
  const Bag* convolution = nullptr;
  float beta = 0.0f;
  const char* pass = "";
};

Parts parts_of(const Bag& operation) {
  Parts parts;
  int beta = 0;
  if (operation.type == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR) {
    parts = {&operation.child(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X),
             &operation.child(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W),
             &operation.child(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y),
             &operation.child(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC), 0.0f, "forward"};
    beta = CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA;
  } else if (operation.type == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR) {
    parts = {&operation.child(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX),
             &operation.child(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W),
             &operation.child(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY),
             &operation.child(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC), 0.0f, "backward_data"};
    beta = CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA;
  } else {
    parts = {&operation.child(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X),
             &operation.child(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW),
             &operation.child(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY),
             &operation.child(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC), 0.0f, "backward_filter"};
    beta = CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA;
  }
  parts.beta = operation.values<float>(beta).at(0);
  return parts;
}

// Sizes must fit together as cuDNN demands.
cudnnStatus_t check_operation(const Bag& operation) {
  const Parts parts = parts_of(operation);
  const auto image = parts.image->integers(CUDNN_ATTR_TENSOR_DIMENSIONS);
  const auto filter = parts.filter->integers(CUDNN_ATTR_TENSOR_DIMENSIONS);
  const auto result = parts.result->integers(CUDNN_ATTR_TENSOR_DIMENSIONS);
  const auto before = parts.convolution->integers(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS);
  const auto after = parts.convolution->integers(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS);
  const auto stride = parts.convolution->integers(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES);
  const auto dilation = parts.convolution->integers(CUDNN_ATTR_CONVOLUTION_DILATIONS);
  if (image[0] != result[0]) return refuse("rows differ");
  if (filter[0] != result[1] || image[1] % filter[1] != 0) return refuse("channels do not fit");
  for (size_t i = 0; i < stride.size(); ++i) {
    const int64_t span = dilation[i] * (filter[2 + i] - 1) + 1;
    if ((image[2 + i] + before[i] + after[i] - span) / stride[i] + 1 != result[2 + i]) return refuse("sizes do not fit");
  }
  return CUDNN_STATUS_SUCCESS;
}

// Statistics are complete, and of one element a channel.
cudnnStatus_t check_statistics(const Bag& operation) {
  const auto x = operation.child(CUDNN_ATTR_OPERATION_GENSTATS_XDESC).integers(CUDNN_ATTR_TENSOR_DIMENSIONS);
  if (operation.values<int>(CUDNN_ATTR_OPERATION_GENSTATS_MODE).at(0) != CUDNN_GENSTATS_SUM_SQSUM ||
      operation.values<int>(CUDNN_ATTR_OPERATION_GENSTATS_MATH_PREC).at(0) != CUDNN_DATA_FLOAT)
    return refuse("no such statistics");
  for (const int name : {CUDNN_ATTR_OPERATION_GENSTATS_SUMDESC, CUDNN_ATTR_OPERATION_GENSTATS_SQSUMDESC}) {
    const Bag& sums = operation.child(name);
    if (sums.integers(CUDNN_ATTR_TENSOR_DIMENSIONS) != std::vector<int64_t>{1, x[1], 1, 1} ||
        sums.values<int>(CUDNN_ATTR_TENSOR_DATA_TYPE).at(0) != CUDNN_DATA_FLOAT)
      return refuse("sums do not fit");
  }
  return CUDNN_STATUS_SUCCESS;
}

const std::vector<Handle>& operations_of(const Bag& plan) {
  return plan.child(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)
      .child(CUDNN_ATTR_ENGINECFG_ENGINE)
      .child(CUDNN_ATTR_ENGINE_OPERATION_GRAPH)
      .children.at(CUDNN_ATTR_OPERATIONGRAPH_OPS);
}

int64_t engine_number(const Bag& plan) {
  const Bag& engine = plan.child(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG).child(CUDNN_ATTR_ENGINECFG_ENGINE);
  return engine.integers(CUDNN_ATTR_ENGINE_GLOBAL_INDEX).at(0);
}

template <typename T>
void give(const std::vector<T>& values, int64_t wanted, int64_t* count, void* data) {
  *count = static_cast<int64_t>(values.size());
  if (data != nullptr)
    std::memcpy(data, values.data(), sizeof(T) * std::min<size_t>(values.size(), static_cast<size_t>(wanted)));
}

}  // namespace

size_t fake_cudnn_version = 91900;
size_t cudnnGetVersion() { return fake_cudnn_version; }
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_BAD_PARAM";
}
void cudnnGetLastErrorString(char* text, size_t bytes) {
  std::strncpy(text, last_error.c_str(), bytes - 1);
  text[bytes - 1] = '\0';
}
int fake_cudnn_handles() { return handles; }
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = new FakeCudnnHandle;
  ++handles;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  delete handle;
  --handles;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* raw) {
  *raw = new Handle(new Bag(type));
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t raw) {
  delete static_cast<Handle*>(raw);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t raw, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* data) {
  Bag& bag = *of(raw);
  if (bag.finalized) return refuse("set after finalize");
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    auto* const raws = static_cast<const cudnnBackendDescriptor_t*>(data);
    for (int64_t i = 0; i < count; ++i) {
      if (!of(raws[i])->finalized) return refuse("a child is not finalized");
      bag.children[name].push_back(of(raws[i]));
    }
  } else {
    const char* bytes = static_cast<const char*>(data);
    bag.bytes[name].assign(bytes, bytes + static_cast<size_t>(count) * size_of(type));
  }
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t raw) {
  Bag& bag = *of(raw);
  bag.finalized = true;
  switch (bag.type) {
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
      return check_operation(bag);
    case CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR:
      return check_statistics(bag);
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR: {
      const auto& operations = bag.children.at(CUDNN_ATTR_OPERATIONGRAPH_OPS);
      if (operations.size() == 1) return CUDNN_STATUS_SUCCESS;
      // What the second reads is what the first writes: the same tensor, not one like it.
      return &operations.at(1)->child(CUDNN_ATTR_OPERATION_GENSTATS_XDESC) == parts_of(*operations.at(0)).result
                 ? CUDNN_STATUS_SUCCESS
                 : refuse("operations are not connected");
    }
    case CUDNN_BACKEND_ENGINE_DESCRIPTOR:
      return engine_of(bag.integers(CUDNN_ATTR_ENGINE_GLOBAL_INDEX).at(0)) ? CUDNN_STATUS_SUCCESS
                                                                          : refuse("no such engine");
    default:
      return CUDNN_STATUS_SUCCESS;
  }
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const raw, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t, int64_t wanted, int64_t* count, void* data) {
  Bag& bag = *of(raw);
  if (!bag.finalized) return refuse("get before finalize");
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: {
      const bool main = bag.values<int>(CUDNN_ATTR_ENGINEHEUR_MODE).at(0) == CUDNN_HEUR_MODE_A;
      *count = main ? static_cast<int64_t>(engines().size()) : 0;
      if (data == nullptr) return CUDNN_STATUS_SUCCESS;
      auto* const raws = static_cast<cudnnBackendDescriptor_t*>(data);
      for (int64_t i = 0; i < std::min(wanted, *count); ++i) {
        Handle engine(new Bag(CUDNN_BACKEND_ENGINE_DESCRIPTOR, true));
        const int64_t number = engines()[static_cast<size_t>(i)].number;
        const char* bytes = reinterpret_cast<const char*>(&number);
        engine->bytes[CUDNN_ATTR_ENGINE_GLOBAL_INDEX].assign(bytes, bytes + sizeof number);
        engine->children[CUDNN_ATTR_ENGINE_OPERATION_GRAPH] = bag.children.at(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
        of(raws[i])->finalized = true;
        of(raws[i])->children[CUDNN_ATTR_ENGINECFG_ENGINE] = {engine};
      }
      return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      *count = 1;
      if (data != nullptr) *of(*static_cast<cudnnBackendDescriptor_t*>(data)) = bag.child(name);
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
      give(engine_of(bag.integers(CUDNN_ATTR_ENGINE_GLOBAL_INDEX).at(0))->notes, wanted, count, data);
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE:
      *count = 0;
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      give(std::vector<int64_t>{engine_of(engine_number(bag))->workspace_bytes}, wanted, count, data);
      return CUDNN_STATUS_SUCCESS;
    default:
      return refuse("unexpected attribute");
  }
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
  const auto& operations = operations_of(*of(plan));
  const Parts parts = parts_of(*operations.at(0));
  const auto ids = of(pack)->integers(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto pointers = of(pack)->values<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  std::map<int64_t, int64_t> offsets;
  for (size_t i = 0; i < ids.size(); ++i) offsets[ids[i]] = fake_offset(pointers[i]);
  const auto at = [&](const Bag& tensor) { return offsets.at(tensor.integers(CUDNN_ATTR_TENSOR_UNIQUE_ID).at(0)); };
  std::ostringstream& out = fake_launch("cudnn", handle->stream);
  out << " pass=" << parts.pass << " engine=" << engine_number(*of(plan));
  fake_list(out, "offsets", std::initializer_list<int64_t>{at(*parts.image), at(*parts.filter), at(*parts.result)});
  void* const workspace = of(pack)->values<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE).at(0);
  if (workspace != nullptr) out << " workspace=" << fake_offset(workspace);
  fake_list(out, "image", parts.image->integers(CUDNN_ATTR_TENSOR_DIMENSIONS));
  fake_list(out, "filter", parts.filter->integers(CUDNN_ATTR_TENSOR_DIMENSIONS));
  fake_list(out, "result", parts.result->integers(CUDNN_ATTR_TENSOR_DIMENSIONS));
  fake_list(out, "strides", parts.image->integers(CUDNN_ATTR_TENSOR_STRIDES));
  fake_list(out, "types", std::initializer_list<int>{parts.image->values<int>(CUDNN_ATTR_TENSOR_DATA_TYPE).at(0),
                                                     parts.filter->values<int>(CUDNN_ATTR_TENSOR_DATA_TYPE).at(0),
                                                     parts.result->values<int>(CUDNN_ATTR_TENSOR_DATA_TYPE).at(0)});
  fake_list(out, "before", parts.convolution->integers(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS));
  fake_list(out, "after", parts.convolution->integers(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS));
  fake_list(out, "stride", parts.convolution->integers(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES));
  fake_list(out, "dilation", parts.convolution->integers(CUDNN_ATTR_CONVOLUTION_DILATIONS));
  out << " beta=" << parts.beta;
  if (operations.size() > 1)
    fake_list(out, "sums",
              std::initializer_list<int64_t>{
                  at(operations.at(1)->child(CUDNN_ATTR_OPERATION_GENSTATS_SUMDESC)),
                  at(operations.at(1)->child(CUDNN_ATTR_OPERATION_GENSTATS_SQSUMDESC))});
  fake_end();
  return CUDNN_STATUS_SUCCESS;
}
