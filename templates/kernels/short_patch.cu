// Convolutions in bf16 and fp16 of 64 channels, forward and back to the image at a stride of one, with filters of several
// places, channels last, filters by the 64.
//
// As in halves_patch.cu what pixels see under the next place of the filter is the same patch some places further on. A
// block has 64 filters, whose weights it keeps, and makes 256 pixels of them at a time. One warpgroup copies patches,
// ahead of two others that take tiles in turn: while one writes what it has made, the other has tensor cores for itself.
// It may sum up statistics of its results on the way.
#include "mbc_patches.cuh"
#include "mbc_statistics.cuh"

struct StatisticsPatchArguments : PatchArguments {
  int64_t blocks;  // for each 64 filters; not those that a GPU has room for, so that sums are the same on all
};

namespace mbc {

constexpr int SHORT_THREADS = (1 + MULTIPLIERS) * WARPGROUP, SHORT_PLACES = PATCH_GROUPS * 8;
// As in mbc/kernels/own/short_patches.py, like MOST_PLACES.
constexpr int SHORT_PATCH_BYTES = MOST_PLACES * HALF_TERMS * 2, SHORT_PATCHES = 3;
// Pieces of 8 terms of all filters, so far apart that those of a filter lie in different banks; under a place eight.
constexpr int KEPT_APART = PATCH_FILTERS * 16 + 16, KEPT_BYTES = 8 * KEPT_APART;
// Results of a pixel, where they lie for a while in the patch that they were made of; eight of them are 16 bytes.
constexpr int RESULT_PITCH = PATCH_FILTERS * 2 + 16, EIGHTS_APART = WARPGROUP / 8;
static_assert(SHORT_PLACES * RESULT_PITCH <= SHORT_PATCH_BYTES);

struct ShortConvolution : PatchConvolution {
  static constexpr int COPIER_REGISTERS = 72, SUMMING_REGISTERS = 216;  // 64 K in all, of which each starts with 168
  ImagePlace next_seen, next_made;  // from one place of a thread to its next

  explicit ShortConvolution(const PatchArguments& a)
      : PatchConvolution(a), next_seen(place(EIGHTS_APART)), next_made(place(EIGHTS_APART / 8 * group)) {}
};

struct ShortRings {
  Ring<SHORT_PATCHES> patches;
  Barrier kept;                  // all weights
  Barrier started[MULTIPLIERS];  // all products of a tile, by this warpgroup
  Barrier meeting[MULTIPLIERS];  // of this warpgroup's warps, twice a tile

  __device__ void start() {
    kept.start(MULTIPLIERS * WARPGROUP);
    for (int group = 0; group < MULTIPLIERS; ++group) {
      started[group].start(WARPGROUP / 32);
      meeting[group].start(WARPGROUP / 32);
    }
    patches.start(WARPGROUP, 1);
  }
};

// Filters 2 i and 2 i + 1 of 16 are rows i and i + 8 of the product, so that a thread makes neighbours.
__device__ inline int32_t row_of_filter(int32_t n) { return n / 16 * 16 + n % 2 * 8 + n % 16 / 2; }

template <typename T>
__device__ inline void keep_weights(const T* __restrict__ weight, char* kept, const ShortConvolution& f) {
  const int32_t first = static_cast<int32_t>(blockIdx.x) % f.across * PATCH_FILTERS;
  for (int32_t i = threadIdx.x - WARPGROUP; i < f.taps * PATCH_FILTERS * 8; i += MULTIPLIERS * WARPGROUP) {
    const int32_t tap = i / (PATCH_FILTERS * 8), n = f.backward ? i % PATCH_FILTERS : i / 8 % PATCH_FILTERS;
    const int32_t eight = f.backward ? i / PATCH_FILTERS % 8 : i % 8;
    Vec<T, 8> terms;
    if (f.backward)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        terms.v[e] = weight[((eight * 8 + e) * f.taps + f.taps - 1 - tap) * f.filters + first + n];
    else
      terms = load<8>(weight + ((first + n) * f.taps + tap) * HALF_TERMS + eight * 8);
    store(reinterpret_cast<T*>(kept + tap * KEPT_BYTES + eight * KEPT_APART + row_of_filter(n) * 16), terms);
  }
}

template <typename T>
__device__ inline void copy_patches(
    const T* __restrict__ x, char* patches, Ring<SHORT_PATCHES>& ring, const ShortConvolution& f) {
  const int32_t eight = threadIdx.x % 8, mine = threadIdx.x / 8, places = f.places();
  int32_t turn = 0;
  for (int32_t tile = blockIdx.x; tile < f.tiles; tile += gridDim.x, ++turn) {
    const int32_t left = f.left(tile);
    ImagePlace at = f.first_seen(tile, mine);
    char* to = patches + turn % SHORT_PATCHES * SHORT_PATCH_BYTES + eight * f.apart;
    ring.wait_until_emptied(turn);
    for (int32_t i = mine; i < places; i += EIGHTS_APART) {
      const int32_t offset = f.seen(at, left);
      copy_16_bytes(reinterpret_cast<uint4*>(to + i * 16), x + max(offset, 0) + eight * 8, offset >= 0);
      f.advance(at, f.next_seen);
    }
    ring.filled[turn % SHORT_PATCHES].arrive_with_copies();
  }
}

// Starts all products of a tile.
template <typename T>
__device__ inline void start_tile(float (&sums)[32][4], const char* kept, const char* line, const ShortConvolution& f) {
  begin_products();
  for (int32_t tap = 0, across = 0; tap < f.taps; ++tap, kept += KEPT_BYTES) {
#pragma unroll
    for (int step = 0; step < HALF_STEPS; ++step) {
      const Pieces weights{kept, 8 * 16, KEPT_APART, step * 2 * KEPT_APART};
      const Pieces image{line, f.group * 16, f.apart, across * 16 + step * 2 * f.apart};
      multiply_shared<false, T>(sums, weights, image, tap + step > 0);
    }
    if (++across == f.kernel_width) {
      across = 0;
      line += f.pitch * 16;
    }
  }
  end_of_products();
}

// What a thread sums up of eight neighbouring channels.
template <typename T>
struct EightStatistics {
  typename Statistics<T>::Running running[8] = {};
  int32_t count = 0;

  __device__ void add(const Held<T, 8>& results) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float a[1] = {to_float(results[e])};
      if (count == 0) running[e] = Statistics<T>{}.begin(a[0]);
      Statistics<T>{}.template push<1>(running[e], 0.0f, a, a);
    }
    ++count;
  }
};

// `partial`: what every warpgroup finds of its filters, where they are asked for.
template <typename T, bool STATISTICS>
__device__ inline void make_tiles(
    const char* kept, char* patches, T* __restrict__ y, typename Statistics<T>::State* partial, ShortRings& rings,
    const ShortConvolution& f) {
  const int32_t thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
  const int32_t group = threadIdx.x / WARPGROUP - 1, eight = thread % 8, mine = thread / 8;
  const auto arrive = [&](Barrier& barrier) {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  };
  const auto meet = [&](uint32_t parity) {
    arrive(rings.meeting[group]);
    rings.meeting[group].wait(parity);
  };
  const int32_t first = static_cast<int32_t>(blockIdx.x) % f.across * PATCH_FILTERS;
  y += first + eight * 8;
  EightStatistics<T> statistics;
  const int32_t step = static_cast<int32_t>(gridDim.x);
  int32_t turn = group;  // of tiles of the block, of which this warpgroup takes every other one
  for (int32_t tile = blockIdx.x + group * step; tile < f.tiles; tile += MULTIPLIERS * step, turn += MULTIPLIERS) {
    float sums[32][4];
    char* const patch = patches + turn % SHORT_PATCHES * SHORT_PATCH_BYTES;
    rings.patches.wait_until_filled(turn);
    show_to_tensor_cores();
    if (turn > 0) rings.started[(turn - 1) % MULTIPLIERS].wait((turn - 1) / MULTIPLIERS % 2);
    start_tile<T>(sums, kept, patch, f);
    arrive(rings.started[group]);
    wait_for_products(sums);
    meet(0);  // nobody reads the patch any more
    char* const results = patch + warp * 16 * 2 + lane / 4 * 4;
#pragma unroll
    for (int j = 0; j < 32; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float two[2] = {sums[j][e], sums[j][2 + e]};
        const int32_t place = j * 8 + lane % 4 * 2 + e;
        *reinterpret_cast<uint32_t*>(results + place * RESULT_PITCH) = rounded_word<T>(two);
      }
    meet(1);
    const int32_t left = f.left(tile);
    ImagePlace at = f.place(f.first(tile) + mine / 8 * f.group + mine % 8);
#pragma unroll 4
    for (int32_t i = mine; i < SHORT_PLACES; i += EIGHTS_APART) {
      const int32_t offset = f.made(at, left);
      const auto made = hold<8>(reinterpret_cast<const T*>(patch + i * RESULT_PITCH) + eight * 8);
      if (offset >= 0) {
        *reinterpret_cast<Held<T, 8>*>(y + offset) = made;
        if constexpr (STATISTICS) statistics.add(made);
      }
      f.advance(at, f.next_made);
    }
    __syncwarp();
    rings.patches.empty(turn);
  }
  if constexpr (STATISTICS) {
    using State = typename Statistics<T>::State;
    // Where its last patch was, and no other comes any more; or the last one of all where it had none.
    State* states = reinterpret_cast<State*>(patches + (turn + 1) % SHORT_PATCHES * SHORT_PATCH_BYTES);
    meet(0);
#pragma unroll
    for (int e = 0; e < 8; ++e)
      states[mine * PATCH_FILTERS + eight * 8 + e] =
          Statistics<T>{}.settle(0.0f, statistics.running[e], statistics.count);
    meet(1);
    if (thread < PATCH_FILTERS)
      partial[(blockIdx.x / f.across * MULTIPLIERS + group) * f.filters + first + thread] = Statistics<T>{}.merged(
          EIGHTS_APART, [&](unsigned i) { return states[i * PATCH_FILTERS + thread]; });
  }
}

template <typename T, bool STATISTICS>
__global__ void __launch_bounds__(SHORT_THREADS, 1)
    convolution_of_short_patches(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y,
                                 typename Statistics<T>::State* partial, ShortConvolution f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ ShortRings rings;
  char* patches = reinterpret_cast<char*>(shared);
  char* kept = patches + SHORT_PATCHES * SHORT_PATCH_BYTES;
  if (threadIdx.x == 0) rings.start();
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    if constexpr (STATISTICS) give_registers<ShortConvolution::COPIER_REGISTERS>();
    copy_patches(x, patches, rings.patches, f);
  } else {
    if constexpr (STATISTICS) take_registers<ShortConvolution::SUMMING_REGISTERS>();
    keep_weights(weight, kept, f);
    show_to_tensor_cores();
    rings.kept.arrive();
    rings.kept.wait(0);
    make_tiles<T, STATISTICS>(kept, patches, y, partial, rings, f);
  }
}

// What all of these launchers refuse.
inline const char* unfit(const MbcCall& call, const ShortConvolution& f) {
  if (f.channels != HALF_TERMS) return "patches have 64 channels";
  if (f.places() > MOST_PLACES) return "a patch is larger than shared memory";
  return unaligned(call);
}

// A block keeps its filters: between its tiles are those of other filters.
template <typename T, bool STATISTICS>
void run_short_patches(
    const MbcCall& call, const ShortConvolution& f, int64_t blocks, typename Statistics<T>::State* partial) {
  const int shared = SHORT_PATCHES * SHORT_PATCH_BYTES + f.taps * KEPT_BYTES;
  MBC_LAUNCH_SHARED((convolution_of_short_patches<T, STATISTICS>), static_cast<unsigned>(blocks * f.across),
                    SHORT_THREADS, shared, call.stream, in<T>(call, 0), in<T>(call, 1), out<T>(call, 2), partial, f);
}

}  // namespace mbc

extern "C" const char* mbc_convolution_of_short_patches(const MbcCall& call) {
#if MBC_WORKING == 0
  return "this kernel takes no fp32";
#else
  using namespace mbc;
  const ShortConvolution f(arguments<PatchArguments>(call));
  if (const char* problem = unfit(call, f)) return problem;
  const int64_t places = f.tiles / f.across, most = multiprocessors() / f.across;
  run_short_patches<MbcWorking, false>(call, f, places < most ? places : most > 0 ? most : 1, nullptr);
  return launched();
#endif
}
// The same; `backward` says that weights are turned.
extern "C" const char* mbc_convolution_backward_data_of_short_patches(const MbcCall& call) {
  return mbc_convolution_of_short_patches(call);
}
// Accesses: image, weights, result, mean, variance, workspace.
extern "C" const char* mbc_convolution_of_short_patches_statistics(const MbcCall& call) {
#if MBC_WORKING == 0
  return "this kernel takes no fp32";
#else
  using namespace mbc;
  const auto& a = arguments<StatisticsPatchArguments>(call);
  const ShortConvolution f(a);
  if (const char* problem = unfit(call, f)) return problem;
  auto* partial = out<Statistics<MbcWorking>::State>(call, 5);
  run_short_patches<MbcWorking, true>(call, f, a.blocks, partial);
  merge_all_parts(call.stream, a.blocks * MULTIPLIERS, f.filters, partial,
                  StatisticsOfMade<MbcWorking>{{nullptr, 0, out<float>(call, 3), out<float>(call, 4)}});
  return launched();
#endif
}
