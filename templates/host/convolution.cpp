// Convolutions through cuDNN's graph API (its C backend): one execution plan for each distinct row, built once.
//
// Accesses of a launch: forward x, w, y, and with statistics the mean and variance of y; data gradient dy, w, dx;
// filter gradient x, dy, dw. A workspace comes last, if there is one.

#include "cudnn_descriptor.h"
#include "mbc_types.h"
#include "cudnn_convolution_arguments.h"

#include <algorithm>
#include <map>

extern "C" const char* mbc_moments(const MbcCall& call);  // moments.cu

namespace {

enum Pass : int64_t { FORWARD = 0, BACKWARD_DATA = 1, BACKWARD_FILTER = 2 };
enum Math : int64_t { STRICT = 0, TENSOR_CORES = 1 };

// A row with what follows it: `knobs` pairs (type, value), and a DepthRow if the convolution has three spatial axes.
// A convolution along one axis is one of images of height 1.
struct Convolution : ConvolutionRow {
  std::vector<int64_t> knob_pairs;
  DepthRow first = {1, 1, 1, 0, 0, 1, 1};
  bool has_depth;

  Convolution(const int64_t* integers, int64_t count)
      : ConvolutionRow(*reinterpret_cast<const ConvolutionRow*>(integers)) {
    const int64_t* const pairs = integers + sizeof(ConvolutionRow) / sizeof(int64_t);
    const int64_t* const behind = pairs + 2 * knobs;
    knob_pairs.assign(pairs, behind);
    has_depth = behind < integers + count;
    if (has_depth) first = *reinterpret_cast<const DepthRow*>(behind);
  }
  std::vector<int64_t> axes(int64_t depth, int64_t height, int64_t width) const {
    return has_depth ? std::vector<int64_t>{depth, height, width} : std::vector<int64_t>{height, width};
  }
  std::vector<int64_t> shape(int64_t outer, int64_t inner, const std::vector<int64_t>& sizes) const {
    std::vector<int64_t> shape = {outer, inner};
    shape.insert(shape.end(), sizes.begin(), sizes.end());
    return shape;
  }
};

constexpr int64_t FULL_ALIGNMENT = 16;  // bytes; a larger alignment helps no engine
constexpr size_t WIDE_INDICES = 90300;  // the first version whose engines index 2^31 elements and more

std::vector<int64_t> strides_of(const std::vector<int64_t>& shape, int64_t layout) {
  const bool last = layout == MBC_CHANNELS_LAST;
  std::vector<int64_t> strides(shape.size());
  int64_t stride = last ? shape[1] : 1;
  for (size_t axis = shape.size(); axis-- > 2; stride *= shape[axis]) strides[axis] = stride;
  strides[1] = last ? 1 : stride;
  strides[0] = last ? stride : stride * shape[1];
  return strides;
}

Descriptor tensor(int64_t id, const std::vector<int64_t>& shape, cudnnDataType_t type, int64_t layout,
                  int64_t alignment) {
  int64_t elements = 1;
  for (const int64_t extent : shape) elements *= extent;
  if (elements > INT32_MAX && cudnnGetVersion() < WIDE_INDICES)
    throw Failure("a tensor has " + std::to_string(elements) +
                  " elements, and cuDNN before 9.3 takes fewer than 2^31: install cuDNN 9.3 or later");
  Descriptor tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensor.data_type(CUDNN_ATTR_TENSOR_DATA_TYPE, type)
      .integers(CUDNN_ATTR_TENSOR_DIMENSIONS, shape)
      .integers(CUDNN_ATTR_TENSOR_STRIDES, strides_of(shape, layout))
      .integers(CUDNN_ATTR_TENSOR_UNIQUE_ID, {id})
      .integers(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, {alignment})
      .finalize("tensor");
  return tensor;
}

// Names of an operation's attributes, which differ by pass.
struct PassNames {
  cudnnBackendDescriptorType_t operation;
  cudnnBackendAttributeName_t image, filter, result, convolution, alpha, beta;
};

const PassNames& names_of(int64_t pass) {
  static const PassNames names[] = {
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
      {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
       CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA},
  };
  return names[pass];
}

constexpr int64_t IMAGE_ID = 1, FILTER_ID = 2, RESULT_ID = 3, SUMS_ID = 4, SQUARES_ID = 5;
constexpr int OPERANDS = 3;

// The order of image (x or dx), filter (w or dw) and result (y or dy) among the accesses of a pass.
std::vector<int64_t> ids_of(int64_t pass) {
  if (pass == FORWARD) return {IMAGE_ID, FILTER_ID, RESULT_ID};
  if (pass == BACKWARD_DATA) return {RESULT_ID, FILTER_ID, IMAGE_ID};
  return {IMAGE_ID, RESULT_ID, FILTER_ID};
}

int64_t alignment_of(int64_t offset) {
  int64_t alignment = FULL_ALIGNMENT;
  while (offset % alignment != 0) alignment /= 2;
  return alignment;
}

// True if the numerical notes of an engine agree with the precision of the plan.
bool admitted(const Descriptor& engine, const ConvolutionRow& row) {
  cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
  int64_t count = 0;
  check_cudnn(cudnnBackendGetAttribute(engine.raw(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                       CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count, notes),
              "get notes");
  for (int64_t i = 0; i < count; ++i) {
    switch (notes[i]) {
      case CUDNN_NUMERICAL_NOTE_TENSOR_CORE:
        if (row.math == STRICT) return false;
        break;
      case CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC:
        if (row.deterministic != 0) return false;
        break;
      case CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION:  // partial sums in bf16 or fp16 lose bits
        if (row.type == MBC_FP32) return false;
        break;
      case CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS:
      case CUDNN_NUMERICAL_NOTE_FFT:
      case CUDNN_NUMERICAL_NOTE_WINOGRAD:
      case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4:
      case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6:
      case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13:
        return false;
      default:
        break;
    }
  }
  // Engines that are compiled at run time need NVRTC, on which a package does not depend.
  cudnnBackendBehaviorNote_t behaviors[CUDNN_BEHAVIOR_NOTE_TYPE_COUNT];
  check_cudnn(cudnnBackendGetAttribute(engine.raw(), CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE,
                                       CUDNN_BEHAVIOR_NOTE_TYPE_COUNT, &count, behaviors),
              "get behaviour");
  return std::find(behaviors, behaviors + count, CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION) == behaviors + count;
}

// The sums of the result and of its squares over each channel, from which the epilogue's mean and variance follow.
struct Moments {
  int64_t channels;  // 0 if no statistics are computed
  int64_t count;     // elements of a channel
  int64_t bytes;     // at the start of the workspace

  static Moments of(const Convolution& row) {
    constexpr int64_t ALIGNMENT = 256;
    if (row.statistics == 0) return {0, 0, 0};
    const int64_t bytes = 2 * row.filters * static_cast<int64_t>(sizeof(float));
    return {row.filters, row.rows * row.first.out * row.out_height * row.out_width, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT};
  }
  int64_t alignment() const { return alignment_of(channels * static_cast<int64_t>(sizeof(float))); }

  void run(void* workspace, void* mean, void* variance, cudaStream_t stream) const {
    void* const pointers[] = {workspace, mean, variance};
    const int64_t integers[] = {channels, count};
    if (const char* text = mbc_moments({pointers, integers, nullptr, stream, 3, 2})) throw Failure(text);
  }
};

// One prepared convolution.
struct Prepared {
  Descriptor plan;
  Convolution row;
  Widening widening;
  Moments moments;
};

int64_t plan_workspace(const Descriptor& plan) {
  int64_t bytes = 0, count = 0;
  check_cudnn(cudnnBackendGetAttribute(plan.raw(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                       &count, &bytes),
              "get workspace size");
  return bytes;
}

class Cudnn : public Library {
 public:
  explicit Cudnn(std::shared_ptr<CudnnHandle> handle) : handle_(std::move(handle)) {}

  int prepare(const int64_t* integers, int64_t integer_count, const int64_t* offsets, int64_t) override {
    std::vector<int64_t> key(integers, integers + integer_count);
    for (int i = 0; i < OPERANDS; ++i) key.push_back(alignment_of(offsets[i]));
    const auto entry = numbers_.find(key);
    if (entry != numbers_.end()) return entry->second;
    prepared_.push_back(make({integers, integer_count}, &key[static_cast<size_t>(integer_count)]));
    const int number = static_cast<int>(prepared_.size()) - 1;
    numbers_.emplace(std::move(key), number);
    return number;
  }

  void run(int number, const MbcCall& call) override {
    const Prepared& prepared = prepared_[static_cast<size_t>(number)];
    const Moments& moments = prepared.moments;
    handle_->use(call.stream);
    std::vector<int64_t> ids = ids_of(prepared.row.pass);
    std::vector<void*> pointers(call.pointers, call.pointers + OPERANDS);
    void* const front = prepared.row.workspace_bytes > 0 ? call.pointers[call.pointer_count - 1] : nullptr;
    const bool widened = prepared.widening.elements > 0;
    if (widened) pointers[2] = front;
    if (moments.channels > 0) {
      ids.insert(ids.end(), {SUMS_ID, SQUARES_ID});
      pointers.insert(pointers.end(), {front, static_cast<float*>(front) + moments.channels});
    }
    void* const spare = static_cast<char*>(front) + prepared.widening.bytes + moments.bytes;
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    pack.integers(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, ids)
        .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, static_cast<int64_t>(pointers.size()),
             pointers.data())
        .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &spare)
        .finalize("variant pack");
    check_cudnn(cudnnBackendExecute(handle_->get(), prepared.plan.raw(), pack.raw()), "execute");
    if (widened) prepared.widening.run(front, call.pointers[2], prepared.row.accumulate != 0, call.stream);
    if (moments.channels > 0) moments.run(front, call.pointers[3], call.pointers[4], call.stream);
  }

 private:
  Prepared make(const Convolution& row, const int64_t* alignments) const {
    const int64_t window = row.first.kernel * row.kernel_height * row.kernel_width;
    const int64_t elements = row.filters * (row.channels / row.groups) * window;
    const Widening widening = Widening::of(row.pass == BACKWARD_FILTER, row.type, elements);
    const Moments moments = Moments::of(row);
    const int64_t budget = row.workspace_bytes - widening.bytes - moments.bytes;
    if (budget < 0)
      throw Failure(std::string("the planned workspace is too small for ") +
                    (widening.bytes > 0 ? "the filter gradient" : "the sums"));
    const std::vector<Descriptor> operations = operations_of(row, alignments, widening.elements > 0);
    Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    graph.children(CUDNN_ATTR_OPERATIONGRAPH_OPS, operations)
        .set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle_->get())
        .finalize("operation graph");
    Descriptor plan = row.engine >= 0 ? named(graph, row, budget) : heuristic(graph, row, budget);
    return {std::move(plan), row, widening, moments};
  }

  static std::vector<Descriptor> operations_of(const Convolution& row, const int64_t* alignments, bool widened) {
    int64_t alignment[4] = {};
    const std::vector<int64_t> ids = ids_of(row.pass);
    for (size_t i = 0; i < ids.size(); ++i) alignment[ids[i]] = alignments[i];
    if (widened) alignment[FILTER_ID] = FULL_ALIGNMENT;
    const auto operand = [&](int64_t id, const std::vector<int64_t>& shape) {
      return tensor(id, shape, data_type_of(row.type), row.layout, alignment[id]);
    };
    const DepthRow& first = row.first;
    const std::vector<int64_t> size = row.axes(first.depth, row.height, row.width);
    const std::vector<int64_t> window = row.axes(first.kernel, row.kernel_height, row.kernel_width);
    const std::vector<int64_t> out = row.axes(first.out, row.out_height, row.out_width);
    const Descriptor image = operand(IMAGE_ID, row.shape(row.rows, row.channels, size));
    const Descriptor filter = operand(FILTER_ID, row.shape(row.filters, row.channels / row.groups, window));
    const Descriptor result = operand(RESULT_ID, row.shape(row.rows, row.filters, out));
    const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
    Descriptor convolution(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    convolution.data_type(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_DATA_FLOAT)
        .set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode)
        .integers(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, {static_cast<int64_t>(size.size())})
        .integers(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, row.axes(first.pad_front, row.pad_top, row.pad_left))
        .integers(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, row.axes(first.pad_back, row.pad_bottom, row.pad_right))
        .integers(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, row.axes(first.stride, row.stride_height, row.stride_width))
        .integers(CUDNN_ATTR_CONVOLUTION_DILATIONS, row.axes(first.dilation, row.dilation_height, row.dilation_width))
        .finalize("convolution");
    const PassNames& names = names_of(row.pass);
    std::vector<Descriptor> operations;
    operations.emplace_back(names.operation);
    operations.back()
        .child(names.image, image)
        .child(names.filter, filter)
        .child(names.result, result)
        .child(names.convolution, convolution)
        .real(names.alpha, 1.0f)
        .real(names.beta, row.accumulate != 0 && !widened ? 1.0f : 0.0f)
        .finalize("operation");
    if (row.statistics != 0) operations.push_back(sums_of(result, row));
    return operations;
  }

  // Sums of the result and of its squares over each channel. The result is written all the same.
  static Descriptor sums_of(const Descriptor& result, const Convolution& row) {
    const std::vector<int64_t> shape = row.shape(1, row.filters, row.axes(1, 1, 1));
    const Descriptor sums = tensor(SUMS_ID, shape, CUDNN_DATA_FLOAT, row.layout, FULL_ALIGNMENT);
    const Descriptor squares = tensor(SQUARES_ID, shape, CUDNN_DATA_FLOAT, row.layout, Moments::of(row).alignment());
    const cudnnGenStatsMode_t mode = CUDNN_GENSTATS_SUM_SQSUM;
    Descriptor operation(CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR);
    operation.set(CUDNN_ATTR_OPERATION_GENSTATS_MODE, CUDNN_TYPE_GENSTATS_MODE, 1, &mode)
        .data_type(CUDNN_ATTR_OPERATION_GENSTATS_MATH_PREC, CUDNN_DATA_FLOAT)
        .child(CUDNN_ATTR_OPERATION_GENSTATS_XDESC, result)
        .child(CUDNN_ATTR_OPERATION_GENSTATS_SUMDESC, sums)
        .child(CUDNN_ATTR_OPERATION_GENSTATS_SQSUMDESC, squares)
        .finalize("statistics");
    return operation;
  }

  Descriptor finished(const Descriptor& configuration) const {
    Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    plan.child(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration)
        .set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle_->get())
        .finalize("execution plan");
    return plan;
  }

  // The engine and knobs that the plan names.
  Descriptor named(const Descriptor& graph, const Convolution& row, int64_t budget) const {
    Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    engine.child(CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph)
        .integers(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, {row.engine})
        .finalize("engine");
    std::vector<Descriptor> choices;
    for (int64_t i = 0; i < row.knobs; ++i) {
      const auto type = static_cast<cudnnBackendKnobType_t>(row.knob_pairs[static_cast<size_t>(2 * i)]);
      choices.emplace_back(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
      choices.back()
          .set(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &type)
          .integers(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, {row.knob_pairs[static_cast<size_t>(2 * i + 1)]})
          .finalize("knob");
    }
    Descriptor configuration(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    configuration.child(CUDNN_ATTR_ENGINECFG_ENGINE, engine);
    if (!choices.empty()) configuration.children(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, choices);
    configuration.finalize("engine configuration");
    Descriptor plan = finished(configuration);
    const int64_t needed = plan_workspace(plan);
    if (needed > budget)
      throw Failure("cuDNN engine " + std::to_string(row.engine) + " needs " + std::to_string(needed) +
                    " bytes of workspace here, the plan has " + std::to_string(budget) +
                    ": compile the source again with this cuDNN");
    return plan;
  }

  // The first configuration that cuDNN's heuristics offer, that is admitted and whose workspace fits.
  Descriptor heuristic(const Descriptor& graph, const ConvolutionRow& row, int64_t budget) const {
    int64_t offered = 0, refused = 0, smallest = INT64_MAX;
    std::string last;
    for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
      Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
      heuristics.child(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)
          .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
      if (cudnnBackendFinalize(heuristics.raw()) != CUDNN_STATUS_SUCCESS) continue;  // nothing in this mode
      for (const Descriptor& configuration :
           heuristics.get_children(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)) {
        ++offered;
        try {
          const std::vector<Descriptor> engine =
              configuration.get_children(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
          if (engine.empty() || !admitted(engine[0], row)) {
            ++refused;
            continue;
          }
          Descriptor plan = finished(configuration);
          const int64_t needed = plan_workspace(plan);
          if (needed <= budget) return plan;
          smallest = std::min(smallest, needed);
        } catch (const Failure& failure) {
          last = failure.what();  // an engine may turn out not to support the graph; the next one may
        }
      }
    }
    std::string text = "cuDNN has no engine for this convolution within the plan: " + std::to_string(offered) +
                       " offered, " + std::to_string(refused) + " refused for their numerical notes";
    if (smallest != INT64_MAX)
      text += ", the smallest workspace is " + std::to_string(smallest) + " bytes of " + std::to_string(budget) +
              " planned";
    throw Failure(last.empty() ? text : text + "; " + last);
  }

  std::shared_ptr<CudnnHandle> handle_;
  std::vector<Prepared> prepared_;
  std::map<std::vector<int64_t>, int> numbers_;
};

}  // namespace

std::unique_ptr<Library> open_cudnn(Shared& shared) { return std::make_unique<Cudnn>(cudnn_handle(shared)); }
