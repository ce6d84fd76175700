// The gradient of an image under windows that lie side by side (a stride as long as the filter), which is a transposed
// convolution as well: of every pixel of the smaller image, as many of the larger one as a filter has places. So it is
// one product, [pixels, filters] by [filters, places * channels], that is rearranged when it is written.
//
// What is written may be a part of a wider tensor: the concatenation behind a transposed convolution, the other part of
// which is copied by the same launch while tensor cores are busy.
#include "conv_operands.cuh"
#include "pipeline.cuh"

struct ApartArguments : ConvolutionSizes {
  int64_t type;
  int64_t all;    // channels of the tensor that is written
  int64_t start;  // the first of them that is made here
};

namespace mbc {

// As in mbc/kernels/cuda/conv/conv_transpose_nonoverlapping.py: what a block makes at once, and terms of a stage.
constexpr int APART_PIXELS = 128, APART_COLUMNS = 256, APART_TERMS = 64;
// Two warps copy operands, two the other part of a concatenation; two warpgroups multiply.
constexpr int FETCHERS = 64;

struct ApartStage {
  static constexpr int COUNT = 4;
  static constexpr int WEIGHTS = APART_PIXELS * OPERAND_ROW;  // where they begin: rows of 64 filters are before
  static constexpr int BLOCKS = APART_COLUMNS / 64;
  static constexpr int BYTES = WEIGHTS + BLOCKS * OPERAND_BLOCK;
};

struct Apart : ConvolutionShape {
  int32_t pixels, chunks, across;  // of the smaller image; filters by the stage, columns by the block
  int64_t columns, all, start;     // of the product; of the tensor that is written
  bool kept;                       // each stage gets the same weights again and again, so that they stay in it

  explicit Apart(const ApartArguments& a)
      : ConvolutionShape(a), pixels(static_cast<int32_t>(a.rows * a.out_height * a.out_width)),
        chunks(filters / APART_TERMS), columns(a.kernel_height * a.kernel_width * a.channels), all(a.all),
        start(a.start) {
    across = static_cast<int32_t>(columns / APART_COLUMNS);
    kept = ApartStage::COUNT % chunks == 0;
  }
  __host__ __device__ int32_t tiles() const { return (pixels + APART_PIXELS - 1) / APART_PIXELS; }
  int64_t image_pixels() const { return int64_t{pixels} * kernel_height * kernel_width; }

  // A block makes the same columns of one tile of pixels after another.
  __device__ int32_t first_column() const { return static_cast<int32_t>(blockIdx.x) % across * APART_COLUMNS; }
  __device__ int32_t first_tile() const { return static_cast<int32_t>(blockIdx.x) / across; }
  __device__ int32_t step() const { return static_cast<int32_t>(gridDim.x) / across; }

  // The element of the larger image where the window of a pixel begins.
  __device__ int64_t window(int32_t pixel) const {
    const ImagePlace at = Places{out_height, out_width}.place(pixel);
    const int64_t line = static_cast<int64_t>(at.image) * height + at.line * kernel_height;
    return (line * width + at.column * kernel_width) * all + start;
  }
  // How far behind it the element of a column of the product is.
  __device__ int64_t of_column(int32_t column) const {
    const int32_t place = column / channels, down = place / kernel_width;
    return static_cast<int64_t>(down * width + place - down * kernel_width) * all + column - place * channels;
  }
};

template <typename T>
__device__ inline void fetch_operands(const T* __restrict__ dy, const T* __restrict__ weight, char* stages,
                                      Ring<ApartStage::COUNT>& ring, const Apart& f) {
  constexpr int APART = FETCHERS / 8;  // rows between a thread's
  const int32_t sixteen = threadIdx.x % 8, mine = threadIdx.x / 8;
  const T* columns = weight + mine * f.columns + f.first_column() + sixteen * 8;
  int32_t turn = 0;
  for (int32_t tile = f.first_tile(); tile < f.tiles(); tile += f.step()) {
    const int32_t first = tile * APART_PIXELS + mine;
    const T* pixels = dy + static_cast<int64_t>(first) * f.filters + sixteen * 8;
    for (int32_t chunk = 0; chunk < f.chunks; ++chunk, ++turn) {
      char* stage = stages + turn % ApartStage::COUNT * ApartStage::BYTES;
      ring.wait_until_emptied(turn);
#pragma unroll
      for (int i = 0; i < APART_PIXELS; i += APART) {
        const bool there = first + i < f.pixels;
        copy_16_bytes(reinterpret_cast<uint4*>(stage + operand_offset(mine + i, sixteen)),
                      there ? pixels + i * f.filters + chunk * APART_TERMS : dy, there);
      }
      if (turn < ApartStage::COUNT || !f.kept) {
        const T* terms = columns + chunk * APART_TERMS * f.columns;
#pragma unroll
        for (int i = 0; i < APART_TERMS; i += APART)
#pragma unroll
          for (int b = 0; b < ApartStage::BLOCKS; ++b)
            copy_16_bytes(reinterpret_cast<uint4*>(stage + ApartStage::WEIGHTS + b * OPERAND_BLOCK +
                                                   operand_offset(mine + i, sixteen)),
                          terms + i * f.columns + b * 64, true);
      }
      ring.filled[turn % ApartStage::COUNT].arrive_with_copies();
    }
  }
}

// The other part of a concatenation, shared out among all blocks. What is on its way waits in `room`, where a thread
// has places of its own: registers would not last for as much.
struct Beside {
  static constexpr int THREADS = WARPGROUP - FETCHERS, AT_ONCE = 4, TURNS = 6;
  static constexpr int BYTES = THREADS * AT_ONCE * TURNS * 16;
};

template <typename T>
__device__ inline void copy_beside(const T* __restrict__ from, T* __restrict__ to, int64_t elements, const Slice& slice,
                                   uint4* room) {
  constexpr int N = WIDTH<T>;
  const int32_t thread = threadIdx.x - FETCHERS;
  const int64_t step = static_cast<int64_t>(gridDim.x) * Beside::THREADS * N, turns = Beside::AT_ONCE * step;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * Beside::THREADS + thread) * N;
  const auto place = [&](int32_t turn, int k) {
    return room + (turn % Beside::TURNS * Beside::AT_ONCE + k) * Beside::THREADS + thread;
  };
  const auto fetch = [&](int64_t i, int32_t turn) {
#pragma unroll
    for (int k = 0; k < Beside::AT_ONCE; ++k, i += step)
      copy_16_bytes(place(turn, k), i < elements ? from + i : from, i < elements);
    end_of_copies();
  };
  for (int32_t turn = 0; turn < Beside::TURNS; ++turn) fetch(first + turn * turns, turn);
  int32_t turn = 0;
  for (int64_t i = first; i < elements; i += turns, ++turn) {
    wait_for_copies<Beside::TURNS - 1>();
#pragma unroll
    for (int k = 0; k < Beside::AT_ONCE; ++k)
      if (i + k * step < elements)
        store_held(to + slice(i + k * step), hold<N>(reinterpret_cast<const T*>(place(turn, k))));
    fetch(i + Beside::TURNS * turns, turn);
  }
  wait_for_copies<0>();
}

// Four threads with four words each: thread t gets the t-th words of all four, in the order of threads.
__device__ inline void exchange(uint32_t (&words)[4], int t) {
#pragma unroll
  for (int mask = 2; mask > 0; mask /= 2) {
    const bool upper = (t & mask) != 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int low = mask == 2 ? k : 2 * k, high = low + mask;
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words[low] : words[high], mask);
      words[low] = upper ? other : words[low];
      words[high] = upper ? words[high] : other;
    }
  }
}

// What the columns of a block have, which it writes again and again.
struct ApartColumns {
  int64_t offset[ApartStage::BLOCKS];  // of 64 columns, from where a window begins
  alignas(32) float bias[APART_COLUMNS];
};

// Rounded as a convolution by itself is, and then with the bias.
template <typename T, bool BIAS>
__device__ inline void write_tile(const float (&sums)[APART_COLUMNS / 8][4], const ApartColumns& columns,
                                  T* __restrict__ y, int32_t first, const Apart& f) {
  const int t = threadIdx.x % 4;
  T* const window[2] = {y + f.window(first) + 8 * t, y + f.window(first + 8) + 8 * t};
#pragma unroll
  for (int j = 0; j < APART_COLUMNS / 8; j += 4) {
    const int64_t offset = columns.offset[j / 8] + j % 8 * 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Held<T, 8> made;
#pragma unroll
      for (int k = 0; k < 4; ++k) made.words[k] = rounded_word<T>(sums[j + k] + 2 * h);
      exchange(made.words, t);
      if (first + 8 * h >= f.pixels) continue;
      if constexpr (BIAS) {
        auto biased = load<8>(columns.bias + (j + t) * 8);
#pragma unroll
        for (int e = 0; e < 8; ++e) biased.v[e] += to_float(made[e]);
        store_floats(window[h] + offset, biased.v);
      } else {
        store_held(window[h] + offset, made);
      }
    }
  }
}

template <typename T, bool BIAS>
__device__ inline void make_tiles(const char* stages, const ApartColumns& columns, T* y,
                                  Ring<ApartStage::COUNT>& ring, const Apart& f) {
  const int32_t group = threadIdx.x / WARPGROUP - 1, lane = threadIdx.x % 32;
  const int32_t mine = group * 64 + threadIdx.x % WARPGROUP / 32 * 16 + lane / 4;
  float sums[APART_COLUMNS / 8][4];
  int32_t turn = 0;
  for (int32_t tile = f.first_tile(); tile < f.tiles(); tile += f.step()) {
    for (int32_t chunk = 0; chunk < f.chunks; ++chunk, ++turn) {
      const char* stage = stages + turn % ApartStage::COUNT * ApartStage::BYTES;
      ring.wait_until_filled(turn);
      show_to_tensor_cores();
      begin_products();
#pragma unroll
      for (int step = 0; step < APART_TERMS / 16; ++step)
        multiply_shared<true, T>(sums, stage + group * OPERAND_BLOCK + step * 32,
                                 stage + ApartStage::WEIGHTS + step * 16 * OPERAND_ROW, chunk > 0 || step > 0);
      end_of_products();
      wait_for_products(sums);
      ring.empty(turn);
    }
    write_tile<T, BIAS>(sums, columns, y, tile * APART_PIXELS + mine, f);
  }
}

template <typename T, bool CONCAT>
__global__ void __launch_bounds__(RING_THREADS, 1)
    windows_apart(const T* __restrict__ dy, const T* __restrict__ weight, const float* __restrict__ bias,
                  const T* __restrict__ other, T* __restrict__ y, int64_t others, Slice slice, Apart f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ Ring<ApartStage::COUNT> ring;
  __shared__ ApartColumns columns;
  char* stages = aligned_shared(shared);
  for (int32_t i = threadIdx.x; i < APART_COLUMNS; i += RING_THREADS) {
    const int32_t column = f.first_column() + i;
    if (i % 64 == 0) columns.offset[i / 64] = f.of_column(column);
    if constexpr (CONCAT) columns.bias[i] = bias[column % f.channels];
  }
  if (threadIdx.x == 0) ring.start(FETCHERS);
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    give_registers<COPIER_REGISTERS>();
    if (threadIdx.x < FETCHERS)
      fetch_operands(dy, weight, stages, ring, f);
    else if constexpr (CONCAT)
      copy_beside(other, y + (f.start == 0 ? f.channels : 0), others, slice,
                  reinterpret_cast<uint4*>(stages + ApartStage::COUNT * ApartStage::BYTES));
  } else {
    take_registers<MULTIPLIER_REGISTERS>();
    make_tiles<T, CONCAT>(stages, columns, y, ring, f);
  }
}

// Operands are those of the product, and of a concatenation a bias and its other part.
template <bool CONCAT, typename T>
void run_windows_apart(const MbcCall& call) {
  const Apart f(arguments<ApartArguments>(call));
  const int64_t beside = f.all - f.channels;
  const Slice slice = CONCAT ? Slice(MBC_CHANNELS_LAST, beside, f.all, 1) : Slice();
  const int64_t most = max(int64_t{1}, multiprocessors() / f.across);
  const unsigned blocks = static_cast<unsigned>(min(int64_t{f.tiles()}, most)) * f.across;
  constexpr int SHARED = ApartStage::COUNT * ApartStage::BYTES + (CONCAT ? Beside::BYTES : 0) + 1008;
  MBC_LAUNCH_SHARED((windows_apart<T, CONCAT>), blocks, RING_THREADS, SHARED, call.stream, in<T>(call, 0),
                    in<T>(call, 1), CONCAT ? in<float>(call, 2) : nullptr, CONCAT ? in<T>(call, 3) : nullptr,
                    out<T>(call, CONCAT ? 4 : 2), f.image_pixels() * beside, slice, f);
}

}  // namespace mbc

extern "C" const char* mbc_convolution_backward_data_apart(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<ApartArguments>(call, [&](auto of) { run_windows_apart<false, decltype(of)>(call); });
}
extern "C" const char* mbc_convolution_backward_data_bias_add_concat(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<ApartArguments>(call, [&](auto of) { run_windows_apart<true, decltype(of)>(call); });
}
