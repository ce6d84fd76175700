// Concatenation along channels, also with a bias, or with batch normalization and ReLU of the result or of the parts;
// and slices of channels.
//
// Bytes      every part in once, every result out once.
// Kernels    channels first: a part of a sample is contiguous and is copied in units of up to 16 bytes. Channels last:
//            a thread keeps its channels, looks up once which part they come from, and walks down the pixels, so that
//            one launch writes whole pixels of all parts.
// Threads    256, along the channels and down the pixels.
// Limit      memory bandwidth.
#include "batch_norm.cuh"
#include "concat_arguments.h"
#include "move_arguments.h"
#include "concat_operands.h"

namespace mbc {

template <typename Unit>
__global__ void copy_rows(const Unit* from, Unit* to, int64_t units, int64_t from_pitch, int64_t to_pitch,
                          Steps steps) {
  const int64_t stride = thread_count();
  Walk at(steps, thread_index());
  for (int64_t i = thread_index(); i < units; i += stride, at.advance(steps))
    to[at.outer * to_pitch + at.inner] = from[at.outer * from_pitch + at.inner];
}

template <typename Unit>
bool try_copy(cudaStream_t stream, const char* from, char* to, int64_t rows, int64_t width_bytes,
              int64_t from_pitch_bytes, int64_t to_pitch_bytes) {
  constexpr int64_t size = sizeof(Unit);
  if (!aligned(from, size) || !aligned(to, size) || width_bytes % size || from_pitch_bytes % size ||
      to_pitch_bytes % size)
    return false;
  const int64_t width = width_bytes / size;
  const unsigned blocks = blocks_for(rows * width);
  MBC_LAUNCH((copy_rows<Unit>), blocks, THREADS, stream, reinterpret_cast<const Unit*>(from),
             reinterpret_cast<Unit*>(to), rows * width, from_pitch_bytes / size, to_pitch_bytes / size,
             Steps(width, 1, static_cast<int64_t>(blocks) * THREADS));
  return true;
}

// Elements have 2 or 4 bytes; copies in the largest unit that divides all addresses and sizes.
inline void copy(cudaStream_t stream, const char* from, char* to, int64_t rows, int64_t width_bytes,
                 int64_t from_pitch_bytes, int64_t to_pitch_bytes) {
  if (try_copy<uint4>(stream, from, to, rows, width_bytes, from_pitch_bytes, to_pitch_bytes)) return;
  if (try_copy<uint2>(stream, from, to, rows, width_bytes, from_pitch_bytes, to_pitch_bytes)) return;
  if (try_copy<uint32_t>(stream, from, to, rows, width_bytes, from_pitch_bytes, to_pitch_bytes)) return;
  try_copy<uint16_t>(stream, from, to, rows, width_bytes, from_pitch_bytes, to_pitch_bytes);
}

// Channels that are adjacent in both tensors: from `first` on in the result, at `from` in their own tensor, whose
// pixels have a pitch of `pitch`. `bias` may be null.
template <typename T>
struct Columns {
  const T* from;
  const float* bias;
  int64_t first, pitch;
};

template <typename T>
struct ManyColumns {
  static constexpr int MANY = 16;  // most parts of a launch
  Columns<T> each[MANY];
  int count;
};

constexpr int COPY_ROWS = 4;                       // rows in flight of a thread
constexpr int COPY_BLOCKS = 4, NORMALIZE_BLOCKS = 3;  // blocks of a multiprocessor

// Writes channels `first` … `first + width - 1` of a tensor whose pixels have a pitch of `pitch`.
template <typename T, int N, bool BIAS>
__global__ void __launch_bounds__(THREADS, COPY_BLOCKS)
    copy_columns(ManyColumns<T> columns, T* y, int64_t rows, int64_t width, int64_t pitch) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const int64_t start = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  if (column >= width || start >= rows) return;
  const int64_t c = column + columns.each[0].first;
  int part = 0;
  while (part + 1 < columns.count && c >= columns.each[part + 1].first) ++part;
  const Columns<T> own = columns.each[part];
  const T* from = own.from + start * own.pitch + (c - own.first);
  T* to = y + start * pitch + c;
  wait_for_prior_grid();
  launch_dependents();
  float bias[N];
  if constexpr (BIAS) {
    if (own.bias != nullptr)
#pragma unroll
      for (int j = 0; j < N; ++j) bias[j] = own.bias[c - own.first + j];
  }
  const int64_t from_step = step * own.pitch, to_step = step * pitch;
  for (int64_t left = (rows - start - 1) / step + 1; left > 0; left -= COPY_ROWS) {
    Held<T, N> x[COPY_ROWS];
#pragma unroll
    for (int k = 0; k < COPY_ROWS; ++k)
      if (k < left) x[k] = hold<N>(from + k * from_step);
#pragma unroll
    for (int k = 0; k < COPY_ROWS; ++k) {
      if (k >= left) break;
      if (BIAS && own.bias != nullptr) {
        float sum[N];
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = to_float(x[k][j]) + bias[j];
        store_floats(to + k * to_step, sum);
      } else {
        store_held(to + k * to_step, x[k]);
      }
    }
    from += COPY_ROWS * from_step;
    to += COPY_ROWS * to_step;
  }
}

// True if no boundary cuts a vector of N elements.
template <typename T, int N>
bool fits(const ManyColumns<T>& columns, const T* y, int64_t width, int64_t pitch) {
  constexpr int64_t BYTES = N * static_cast<int64_t>(sizeof(T));
  bool whole = aligned(y, BYTES) && width % N == 0 && pitch % N == 0;
  for (int i = 0; i < columns.count; ++i) {
    const Columns<T>& own = columns.each[i];
    whole = whole && aligned(own.from, BYTES) && own.pitch % N == 0 && own.first % N == 0;
  }
  return whole;
}

template <bool BIAS, typename T>
void copy_all_columns(cudaStream_t stream, const ManyColumns<T>& columns, T* y, int64_t rows, int64_t width,
                      int64_t pitch) {
  const auto run = [&](auto n) {
    const ChannelTiling tiling(width / n);
    const int64_t wanted = divide_up(rows, tiling.threads_y() * COPY_ROWS);
    const int64_t most = multiprocessors() * COPY_BLOCKS * MAP_WAVES / tiling.columns;
    const dim3 grid(tiling.columns, static_cast<unsigned>(min(wanted, max(int64_t{1}, most))));
    MBC_LAUNCH((copy_columns<T, n, BIAS>), grid, dim3(tiling.threads_x, tiling.threads_y()), stream, columns, y, rows,
               width, pitch);
  };
  constexpr int N = WIDTH<T>;
  if (fits<T, N>(columns, y, width, pitch)) return run(std::integral_constant<int, N>());
  by_vectors<N / 2>(fits<T, N / 2>(columns, y, width, pitch), run);
}

// Each part has its own normalization.
struct NormalizeReluParts {
  static constexpr int MANY = 4;
  NormalizeRelu each[MANY];
  int64_t first[MANY];
  int count;

  using Channel = NormalizeRelu::Channel;
  __device__ Channel load(int64_t c) const {
    int part = 0;
    while (part + 1 < count && c >= first[part + 1]) ++part;
    return each[part].load(c - first[part]);
  }
  __device__ float operator()(const Channel& channel, float x, float) const { return each[0](channel, x, 0.0f); }
};

// normalize and relu of a concatenation; with BOTH, the concatenation itself is stored, too.
template <typename T, int N, bool BOTH, typename F>
__global__ void __launch_bounds__(THREADS, NORMALIZE_BLOCKS)
    concat_normalize_relu(ManyColumns<T> columns, T* joined, T* y, int64_t rows, int64_t channels, F f) {
  using Channel = typename F::Channel;
  __shared__ ChannelTable<Channel, N> table;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const int64_t start = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  int part = 0;
  while (part + 1 < columns.count && c >= columns.each[part + 1].first) ++part;
  const Columns<T> own = columns.each[part];
  const T* from = own.from + start * own.pitch + (c - own.first);
  int64_t at = start * channels + c;
  const int64_t from_step = step * own.pitch, to_step = step * channels;
  int64_t left = c < channels && start < rows ? (rows - start - 1) / step + 1 : 0;
  wait_for_prior_grid();
  launch_dependents();
  Channel channel[N];
  const auto process_rows = [&](auto while_loading) {
    Held<T, N> x[COPY_ROWS];
#pragma unroll
    for (int k = 0; k < COPY_ROWS; ++k)
      if (k < left) x[k] = hold<N>(from + k * from_step);
    while_loading();
#pragma unroll
    for (int k = 0; k < COPY_ROWS; ++k)
      if (k < left) {
        float result[N];
#pragma unroll
        for (int j = 0; j < N; ++j) result[j] = f(channel[j], to_float(x[k][j]), 0.0f);
        if constexpr (BOTH) store_held(joined + at + k * to_step, x[k]);
        store_floats(y + at + k * to_step, result);
      }
    left -= COPY_ROWS;
    from += COPY_ROWS * from_step;
    at += COPY_ROWS * to_step;
  };
  process_rows([&] {
    table.fill(channels, f);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; ++j) channel[j] = table.take(j);
  });
  while (left > 0) process_rows([] {});
}

// The channels of every part follow the arguments; a part is the first of `a.operands` operands.
template <bool BOTH, typename T, typename F>
void concat_normalized(const MbcCall& call, const ConcatOperands& at, const F& f) {
  const auto& a = arguments<ConcatNormalizeArguments>(call);
  const int64_t* channels = behind<ConcatNormalizeArguments>(call);
  constexpr int N = WIDTH<T>;
  ManyColumns<T> columns{};
  int64_t all = 0;
  for (; columns.count < a.inputs; all += channels[columns.count++])
    columns.each[columns.count] = {at.parts[columns.count * a.operands], nullptr, all, channels[columns.count]};
  T *joined = at.joined, *y = at.y;
  const int64_t rows = a.rows * a.inner;
  by_vectors<N>(fits<T, N>(columns, y, all, all) && aligned(joined, 16), [&](auto n) {
    const ChannelTiling tiling(all / n);
    const int64_t wanted = divide_up(rows, tiling.threads_y() * COPY_ROWS);
    const int64_t wave = max(int64_t{1}, multiprocessors() * NORMALIZE_BLOCKS / tiling.columns);
    const int64_t waves = min(int64_t{MAP_WAVES}, max(int64_t{1}, wanted * COPY_ROWS / (wave * WAVE_ROWS)));
    const dim3 grid(tiling.columns, static_cast<unsigned>(min(wanted, wave * waves)));
    MBC_LAUNCH((concat_normalize_relu<T, n, BOTH, F>), grid, dim3(tiling.threads_x, tiling.threads_y()), call.stream,
               columns, joined, y, rows, all, f);
  });
}

// Concatenates tensors of `channels`, channels last. `part(i)` is the i-th part, `bias(i)` its bias or null.
template <bool BIAS, typename T, typename Part, typename Bias>
void concat_columns(cudaStream_t stream, int64_t rows, int64_t inputs, const int64_t* channels, T* y, Part part,
                    Bias bias) {
  int64_t pitch = 0, first = 0;
  for (int64_t i = 0; i < inputs; ++i) pitch += channels[i];
  for (int64_t i = 0; i < inputs;) {
    ManyColumns<T> columns{};
    int64_t width = 0;
    for (; i < inputs && columns.count < ManyColumns<T>::MANY; ++i, ++columns.count) {
      columns.each[columns.count] = {part(i), bias(i), first + width, channels[i]};
      width += channels[i];
    }
    copy_all_columns<BIAS>(stream, columns, y, rows, width, pitch);
    first += width;
  }
}

inline int64_t element_bytes(int64_t type) { return type == MBC_FP32 ? 4 : 2; }

}  // namespace mbc

extern "C" const char* mbc_concat(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ConcatArguments>(call);
  const int64_t* channels = behind<ConcatArguments>(call);
  const auto at = operands_of_concat(call);
  if (a.layout == MBC_CHANNELS_LAST) {
    MBC_FOR_TYPE(a.type, T, {
      concat_columns<false>(
          call.stream, a.rows * a.inner, a.inputs, channels, at.y.as<T>(), [&](int64_t i) { return at.parts[i]; },
          [](int64_t) { return nullptr; });
    });
    return launched();
  }
  const int64_t unit = element_bytes(a.type) * a.inner;
  int64_t total = 0, start = 0;
  for (int64_t i = 0; i < a.inputs; ++i) total += channels[i];
  char* to = at.y;
  for (int64_t i = 0; i < a.inputs; start += channels[i], ++i)
    copy(call.stream, at.parts[i], to + start * unit, a.rows, channels[i] * unit, channels[i] * unit, total * unit);
  return launched();
}

extern "C" const char* mbc_bias_add_concat(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<BiasConcatArguments>(call);
  const int64_t* channels = behind<BiasConcatArguments>(call);
  const auto at = operands_of_bias_add_concat(call);
  MBC_FOR_TYPE(a.type, T, {
    concat_columns<true>(
        call.stream, a.rows * a.inner, a.inputs, channels, at.y.as<T>(),
        [&](int64_t i) { return i == a.biased ? at.x : at.other; },
        [&](int64_t i) { return i == a.biased ? at.bias : Operand(); });
  });
  return launched();
}

extern "C" const char* mbc_concat_batch_normalize_relu(const MbcCall& call) {
  using namespace mbc;
  const auto at = operands_of_concat_batch_normalize_relu(call);
  const NormalizeRelu f{normalize(at, eps(call, 0))};
  MBC_FOR_TYPE(arguments<ConcatNormalizeArguments>(call).type, T, { concat_normalized<true, T>(call, at, f); });
  return launched();
}

extern "C" const char* mbc_batch_normalize_relu_concat(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ConcatNormalizeArguments>(call);
  const int64_t* channels = behind<ConcatNormalizeArguments>(call);
  const auto at = operands_of_batch_normalize_relu_concat(call);
  NormalizeReluParts f{};
  int64_t first = 0;
  for (; f.count < a.inputs; first += channels[f.count++]) {
    const OperandList x{at.parts.pointers + f.count * a.operands};  // a part, mean, variance, scale and shift if any
    const Operand scale = a.affine ? x[3] : Operand(), shift = a.affine ? x[4] : Operand();
    f.each[f.count] = {Normalize{x[1], x[2], scale, shift, eps(call, f.count)}};
    f.first[f.count] = first;
  }
  MBC_FOR_TYPE(a.type, T, { concat_normalized<false, T>(call, at, f); });
  return launched();
}

extern "C" const char* mbc_channel_slice(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ChannelSliceArguments>(call);
  if (a.layout == MBC_CHANNELS_LAST) {
    MBC_FOR_TYPE(a.type, T, {
      ManyColumns<T> columns{};
      columns.each[columns.count++] = {in<T>(call, 0) + a.start, nullptr, 0, a.channels};
      copy_all_columns<false>(call.stream, columns, out<T>(call, 1), a.rows * a.inner, a.count, a.count);
    });
    return launched();
  }
  const int64_t unit = element_bytes(a.type) * a.inner;
  copy(call.stream, in<char>(call, 0) + a.start * unit, out<char>(call, 1), a.rows, a.count * unit, a.channels * unit,
       a.count * unit);
  return launched();
}
