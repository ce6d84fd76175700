// Convolutions of one place at a step of one, in bf16 and fp16, channels last: a product, [pixels, channels] by
// [channels, filters]. It takes next to nothing, what it writes takes the time. So it can be made again along with the
// sums of batch normalisation's backward pass, which would read its result: they get it on the way, as it is written.
//
// A block keeps the weights of its filters and makes tiles of pixels one after another. One warpgroup copies pixels, one
// multiplies, and two write what it has made and sum up, the gradients for which they have fetched long before.
#include "mbc_fused.cuh"
#include "mbc_ring.cuh"

struct PointwiseArguments {
  int64_t type;
  int64_t pixels;
  int64_t channels;
  int64_t filters;
  int64_t blocks;  // not those that a GPU has room for, so that sums are the same on all
};

namespace mbc {

// As in mbc/kernels/own/pointwise.py: what a block makes at once, and channels of a stage.
constexpr int POINT_PIXELS = 64, POINT_FILTERS = 256, POINT_CHANNELS = 64;
constexpr int POINT_WRITERS = 2, POINT_THREADS = (2 + POINT_WRITERS) * WARPGROUP;  // warpgroups
constexpr int WRITER_WARPS = POINT_WRITERS * WARPGROUP / 32;  // each has all filters of a pixel, eight a thread
constexpr int WRITER_PIXELS = POINT_PIXELS / WRITER_WARPS;    // of a tile
// 64 K in all, of which each starts with 128.
constexpr int POINT_COPIER_REGISTERS = 40, POINT_MULTIPLIER_REGISTERS = 200, POINT_WRITER_REGISTERS = 136;

struct PointRings {
  static constexpr int STAGES = 3, RESULTS = 2;
  static constexpr int KEPT_BYTES = POINT_FILTERS * OPERAND_ROW;     // of weights of 64 channels
  static constexpr int STAGE_BYTES = POINT_PIXELS * OPERAND_ROW;
  static constexpr int RESULT_PITCH = POINT_FILTERS * 2 + 16;        // words of neighbouring pixels: different banks
  static constexpr int RESULT_BYTES = POINT_PIXELS * RESULT_PITCH;
  Ring<STAGES> pixels;
  Ring<RESULTS> results;

  __device__ void start() {
    pixels.start(WARPGROUP, 1);
    results.start(WARPGROUP, POINT_WRITERS);
  }
};

// `LAST_FIRST`: as sums go, which begin with what the launch before may have left in the cache.
template <bool LAST_FIRST>
struct Pointwise {
  int32_t pixels, channels, filters, across, tiles;  // blocks of filters; tiles of pixels

  explicit Pointwise(const PointwiseArguments& a)
      : pixels(static_cast<int32_t>(a.pixels)), channels(static_cast<int32_t>(a.channels)),
        filters(static_cast<int32_t>(a.filters)), across(static_cast<int32_t>(divide_up(a.filters, POINT_FILTERS))),
        tiles(static_cast<int32_t>(divide_up(a.pixels, POINT_PIXELS))) {}
  __host__ __device__ int32_t chunks() const { return channels / POINT_CHANNELS; }
  int shared_bytes() const {
    return chunks() * PointRings::KEPT_BYTES + PointRings::STAGES * PointRings::STAGE_BYTES +
           PointRings::RESULTS * PointRings::RESULT_BYTES + 1008;
  }
  // A block makes the same filters of one tile after another.
  __device__ int32_t first_filter() const { return static_cast<int32_t>(blockIdx.x) % across * POINT_FILTERS; }
  __device__ int32_t place() const { return static_cast<int32_t>(blockIdx.x) / across; }  // among blocks of its filters
  __device__ int32_t step() const { return static_cast<int32_t>(gridDim.x) / across; }
  __device__ int32_t count() const { return place() < tiles ? (tiles - place() - 1) / step() + 1 : 0; }
  // The first pixel of a block's tile, past the end behind its last one.
  __device__ int32_t first_pixel(int32_t number) const {
    const int32_t tile = place() + number * step();
    return (tile >= tiles ? tiles : LAST_FIRST ? tiles - 1 - tile : tile) * POINT_PIXELS;
  }
};

template <typename T, bool LAST_FIRST>
__device__ inline void copy_points(const T* __restrict__ image, const T* __restrict__ weight, char* kept, char* stages,
                                   Ring<PointRings::STAGES>& ring, const Pointwise<LAST_FIRST>& f) {
  constexpr int APART = WARPGROUP / 8;  // rows between a thread's
  const int32_t sixteen = threadIdx.x % 8, mine = threadIdx.x / 8, chunks = f.chunks(), count = f.count();
  int32_t turn = 0;
  for (int32_t number = 0; number < count; ++number)
    for (int32_t chunk = 0; chunk < chunks; ++chunk, ++turn) {
      const int32_t channel = chunk * POINT_CHANNELS + sixteen * 8;
      if (number == 0)
        for (int32_t i = mine; i < POINT_FILTERS; i += APART) {
          const int32_t filter = f.first_filter() + i;
          const bool there = filter < f.filters;
          copy_16_bytes(reinterpret_cast<uint4*>(kept + chunk * PointRings::KEPT_BYTES + operand_offset(i, sixteen)),
                        there ? weight + static_cast<int64_t>(filter) * f.channels + channel : weight, there);
        }
      ring.wait_until_emptied(turn);
#pragma unroll
      for (int i = 0; i < POINT_PIXELS; i += APART) {
        const int32_t pixel = f.first_pixel(number) + mine + i;
        const bool there = pixel < f.pixels;
        copy_16_bytes(reinterpret_cast<uint4*>(stages + turn % PointRings::STAGES * PointRings::STAGE_BYTES +
                                               operand_offset(mine + i, sixteen)),
                      there ? image + static_cast<int64_t>(pixel) * f.channels + channel : image, there);
      }
      ring.filled[turn % PointRings::STAGES].arrive_with_copies();
    }
}

template <typename T, bool LAST_FIRST>
__device__ inline void multiply_points(
    const char* kept, const char* stages, char* results, PointRings& rings, const Pointwise<LAST_FIRST>& f) {
  const int32_t lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane / 4, chunks = f.chunks();
  float sums[2][POINT_FILTERS / 16][4];  // of either half of the filters
  int32_t turn = 0;
  for (int32_t number = 0; number < f.count(); ++number) {
    for (int32_t chunk = 0; chunk < chunks; ++chunk, ++turn) {
      const char* stage = stages + turn % PointRings::STAGES * PointRings::STAGE_BYTES;
      const char* weights = kept + chunk * PointRings::KEPT_BYTES;
      rings.pixels.wait_until_filled(turn);
      show_to_tensor_cores();
      begin_products();
#pragma unroll
      for (int step = 0; step < POINT_CHANNELS / 16; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          multiply_shared<false, T>(sums[half], stage + step * 32,
                                    weights + half * PointRings::KEPT_BYTES / 2 + step * 32, chunk > 0 || step > 0);
      end_of_products();
      wait_for_products(sums[0]);
      wait_for_products(sums[1]);
      rings.pixels.empty(turn);
    }
    rings.results.wait_until_emptied(number);
    char* to = results + number % PointRings::RESULTS * PointRings::RESULT_BYTES + row * PointRings::RESULT_PITCH +
               lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < POINT_FILTERS / 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<uint32_t*>(to + 8 * h * PointRings::RESULT_PITCH + j * 16) =
            rounded_word<T>(sums[j / 16][j % 16] + 2 * h);
    rings.results.filled[number % PointRings::RESULTS].arrive();
  }
}

// Where results are only written.
struct NoGradient {
  static constexpr int OPERANDS = 0;
  template <int N>
  struct Fetched {};
  template <int N>
  __device__ Fetched<N> fetch(int64_t) const { return {}; }
};

// A warp writes one pixel after another, and sums up what S has for it (see mbc_channel_reduce.cuh) beside it. `partial`:
// what each warp finds of its filters.
template <typename T, typename S, bool LAST_FIRST>
__device__ inline void write_points(const char* results, T* __restrict__ x, const S& source, const Sums& sums,
                                    Sums::State* partial, Ring<PointRings::RESULTS>& ring,
                                    const Pointwise<LAST_FIRST>& f) {
  constexpr bool SUMMING = S::OPERANDS > 0;
  constexpr int AHEAD = S::OPERANDS > 2 ? WRITER_PIXELS / 2 : WRITER_PIXELS;  // pixels that are on their way
  const int32_t lane = threadIdx.x % 32, warp = static_cast<int32_t>(threadIdx.x) / 32 - 2 * WARPGROUP / 32;
  const int32_t filter = f.first_filter() + lane * 8, count = f.count();
  const bool mine = filter < f.filters;
  float mean[8];
  Sums::State running[8] = {};
  typename S::template Fetched<8> fetched[AHEAD];
  // Of the i-th of this warp's pixels of a tile; there is none past the end.
  const auto pixel = [&](int32_t number, int i) { return f.first_pixel(number) + i * WRITER_WARPS + warp; };
  const auto at = [&](int32_t pixel) { return static_cast<int64_t>(pixel) * f.filters + filter; };
  const auto fetch = [&](int32_t number, int i) {
    const int32_t next = pixel(number, i);
    if (mine && next < f.pixels) fetched[i % AHEAD] = source.template fetch<8>(at(next));
  };
#pragma unroll
  for (int j = 0; j < 8; ++j) mean[j] = SUMMING && mine ? sums.load(filter + j) : 0.0f;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) fetch(0, i);
  for (int32_t number = 0; number < count; ++number) {
    ring.wait_until_filled(number);
    const char* result = results + number % PointRings::RESULTS * PointRings::RESULT_BYTES + lane * 16;
#pragma unroll
    for (int i = 0; i < WRITER_PIXELS; ++i) {
      const int32_t now = pixel(number, i);
      if (mine && now < f.pixels) {
        const auto made = hold<8>(
            reinterpret_cast<const T*>(result + (i * WRITER_WARPS + warp) * PointRings::RESULT_PITCH));
        store_held(x + at(now), made);
        if constexpr (SUMMING) {
          auto& beside = fetched[i % AHEAD];
          source.template finish<8>(beside, [&](int j) { return mean[j]; }, at(now));
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float a[1] = {to_float(made[j])}, d[1] = {source.template first<8>(beside, j)};
            sums.push<1>(running[j], mean[j], a, d);
          }
        }
      }
      fetch(number + (i + AHEAD) / WRITER_PIXELS, (i + AHEAD) % WRITER_PIXELS);
    }
    __syncwarp();
    ring.empty(number);
  }
  if constexpr (SUMMING) {
    const int64_t part = static_cast<int64_t>(f.place()) * WRITER_WARPS + warp;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (mine) partial[part * f.filters + filter + j] = running[j];
  }
}

template <typename T, typename S, bool LAST_FIRST>
__global__ void __launch_bounds__(POINT_THREADS, 1)
    pointwise(const T* __restrict__ image, const T* __restrict__ weight, T* __restrict__ x, S source, Sums sums,
              Sums::State* partial, Pointwise<LAST_FIRST> f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ PointRings rings;
  char* kept = aligned_shared(shared);
  char* stages = kept + f.chunks() * PointRings::KEPT_BYTES;
  char* results = stages + PointRings::STAGES * PointRings::STAGE_BYTES;
  if (threadIdx.x == 0) rings.start();
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    give_registers<POINT_COPIER_REGISTERS>();
    copy_points(image, weight, kept, stages, rings.pixels, f);
  } else if (threadIdx.x < 2 * WARPGROUP) {
    take_registers<POINT_MULTIPLIER_REGISTERS>();
    multiply_points<T>(kept, stages, results, rings, f);
  } else {
    take_registers<POINT_WRITER_REGISTERS>();
    write_points(results, x, source, sums, partial, rings.results, f);
  }
}

template <typename T, typename S>
void run_pointwise(const MbcCall& call, const PointwiseArguments& a, int result, const S& source, const Sums& sums,
                   Sums::State* partial) {
  constexpr bool SUMMING = S::OPERANDS > 0;
  const Pointwise<SUMMING> f(a);
  MBC_LAUNCH_SHARED((pointwise<T, S, SUMMING>), static_cast<unsigned>(a.blocks * f.across), POINT_THREADS,
                    f.shared_bytes(), call.stream, in<T>(call, 0), in<T>(call, 1), out<T>(call, result), source, sums,
                    partial, f);
  if constexpr (SUMMING) merge_all_parts(call.stream, a.blocks * WRITER_WARPS, a.filters, partial, sums);
}

// Behind image and weights come `operands` of the gradient, mean and variance; x, what else `made` says, dgamma, dbeta,
// workspace.
template <typename T, typename S>
void run_pointwise_sums(const MbcCall& call, const S& source, int operands, int made) {
  const int mean = 2 + operands, x = mean + 2, dgamma = x + 1 + made;
  const Sums sums{in<float>(call, mean), in<float>(call, mean + 1), out<float>(call, dgamma),
                  out<float>(call, dgamma + 1), eps(call, 0), 0};
  run_pointwise<T>(call, arguments<PointwiseArguments>(call), x, source, sums, out<Sums::State>(call, dgamma + 2));
}

// Of the gradient through relu, which is written on the way; ADD: of a sum of two.
template <typename T, bool ADD, typename Relu>
void run_pointwise_behind(const MbcCall& call, const Relu& relu, int gradient, int d) {
  run_pointwise_sums<T>(call,
                        Behind<T, ADD, false, Relu>{relu, in<T>(call, gradient), ADD ? in<T>(call, gradient + 1) : nullptr,
                                                    nullptr, out<T>(call, d)},
                        ADD ? 3 : 2, 1);
}

}  // namespace mbc

extern "C" const char* mbc_pointwise(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    run_pointwise<decltype(of)>(call, arguments<PointwiseArguments>(call), 2, NoGradient{}, Sums{}, nullptr);
  });
}
extern "C" const char* mbc_pointwise_sums(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    run_pointwise_sums<T>(call, InMemory<T, false, false>{{in<T>(call, 2), nullptr}}, 1, 0);
  });
}
extern "C" const char* mbc_pointwise_relu_backward_sums(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    run_pointwise_behind<T, false>(call, ByOutput<T>{in<T>(call, 2)}, 3, 7);
  });
}
extern "C" const char* mbc_pointwise_add_relu_backward_sums(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    run_pointwise_behind<T, true>(call, ByOutput<T>{in<T>(call, 4)}, 2, 8);
  });
}
extern "C" const char* mbc_pointwise_relu_backward_signs_sums(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    run_pointwise_behind<decltype(of), false>(call, BySigns{in<uint8_t>(call, 3)}, 2, 7);
  });
}
extern "C" const char* mbc_pointwise_add_relu_backward_signs_sums(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    run_pointwise_behind<decltype(of), true>(call, BySigns{in<uint8_t>(call, 4)}, 2, 8);
  });
}
