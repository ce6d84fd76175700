// Convolutions in fp32 with filters of several places, forward and back to the image at a stride of one, in three
// products of fp16 (fp32_emulated.cuh), channels last, by the 64.
//
// A block makes 256 pixels of 64 channels at a time. Of the image it holds the patch that these pixels see, 64 channels
// at a time, in halves: each word is divided once for all places of the filter, since what the pixels see under another
// place lies in the same patch some places further on. These words share a scale; each filter has one for 64 terms.
// Seven warps divide patches and one copies weights, which were divided before; two warpgroups multiply, each 128
// pixels.
#include "fp32_emulated_halo.cuh"
#include "halo.cuh"

namespace mbc {

constexpr int PATCH_BYTES = MOST_PLACES * HALF_TERMS * 4, PATCHES = 2;
constexpr int FRAGMENTS_BYTES = PATCH_FILTERS * HALF_TERMS * 4;  // weights of a stage, after which come their scales
constexpr int WEIGHTS_BYTES = FRAGMENTS_BYTES + PATCH_FILTERS * 4, WEIGHTS = 2;
constexpr int PATCH_DIVIDER_REGISTERS = 56, PATCH_MULTIPLIER_REGISTERS = 200;  // of 64 K in all
constexpr int DIVIDING = DIVIDERS - 32, FRAGMENT_THREADS = 256;
// Places from one of a thread to its next, and of it that are read together.
constexpr int DIVIDED_APART = DIVIDING / 8, DIVIDED_AT_ONCE = 4, DIVIDED_TURN = DIVIDED_APART * DIVIDED_AT_ONCE;
constexpr int PLACES_LOOKED_UP = (MOST_PLACES / DIVIDED_TURN + 1) * DIVIDED_TURN;

struct DividedConvolution : PatchConvolution {
  ImagePlace next_found;

  static_assert(PATCH_CHANNELS == HALF_TERMS);
  explicit DividedConvolution(const PatchArguments& a)
      : PatchConvolution(a), next_found(place(8 * DIVIDED_APART)) {}
  __device__ int32_t stages() const { return taps * chunks; }
};

// Weights as threads that multiply take them: of every stage of 64 filters, for each 16 terms what halves hold and what
// that leaves of the words of each thread, and what takes off the scale of each filter.
__global__ void prepare_fragments(const float* __restrict__ weight, char* prepared, DividedConvolution f) {
  __shared__ float tile[PATCH_FILTERS][HALF_TERMS + 1], up[PATCH_FILTERS];
  const int32_t stage = blockIdx.x, channel = stage / f.taps * HALF_TERMS, tap = stage % f.taps;
  const int32_t first = blockIdx.y * PATCH_FILTERS;
  for (int32_t i = threadIdx.x; i < PATCH_FILTERS * HALF_TERMS; i += FRAGMENT_THREADS) {
    const int32_t n = f.backward ? i % PATCH_FILTERS : i / HALF_TERMS;
    const int32_t c = f.backward ? i / PATCH_FILTERS : i % HALF_TERMS;
    const int64_t at = f.backward
                           ? (static_cast<int64_t>(channel + c) * f.taps + f.taps - 1 - tap) * f.filters + first + n
                           : (static_cast<int64_t>(first + n) * f.taps + tap) * f.channels + channel + c;
    tile[n][c] = weight[at];
  }
  __syncthreads();
  char* to = prepared + (static_cast<int64_t>(blockIdx.y) * f.stages() + stage) * WEIGHTS_BYTES;
  if (threadIdx.x < PATCH_FILTERS) {
    float largest = 0.0f;
    for (int32_t c = 0; c < HALF_TERMS; ++c) largest = larger_finite(largest, tile[threadIdx.x][c]);
    const HalfScale scale(largest);
    up[threadIdx.x] = scale.up;
    reinterpret_cast<float*>(to + FRAGMENTS_BYTES)[threadIdx.x] = scale.down;
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < HALF_STEPS * WARPGROUP; i += FRAGMENT_THREADS) {
    const int32_t step = i / WARPGROUP, lane = i % 32, n = i % WARPGROUP / 32 * 16 + lane / 4;
    uint32_t high[4], low[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t row = n + e % 2 * 8;
      const float* two = tile[row] + step * 16 + lane % 4 * 2 + e / 2 * 8;
      const Halves halves = halves_of(two[0] * up[row], two[1] * up[row]);
      high[e] = halves.high;
      low[e] = halves.low;
    }
    uint4* fragments = reinterpret_cast<uint4*>(to) + step * 2 * WARPGROUP + i % WARPGROUP;
    fragments[0] = {high[0], high[1], high[2], high[3]};
    fragments[WARPGROUP] = {low[0], low[1], low[2], low[3]};
  }
}

struct PatchRings {
  Ring<PATCHES> patches;
  Ring<WEIGHTS> weights;
  Barrier agreed;  // on the largest of a patch
  float largest[2][DIVIDING / 32], down[PATCHES];
  int32_t offsets[PLACES_LOOKED_UP];                     // of places of a patch, in the image
  int32_t outputs[2][PATCH_GROUPS * 8];       // where what comes to the places of a tile is written

  __device__ void start() {
    patches.start(DIVIDING);
    weights.start(1);
    agreed.start(DIVIDING / 32);
    barriers_are_started();
  }
};

__device__ inline void copy_weights(
    const char* __restrict__ prepared, char* stages, PatchRings& rings, const DividedConvolution& f) {
  int32_t turn = 0;
  for (int32_t tile = blockIdx.x; tile < f.tiles; tile += gridDim.x) {
    const char* from = prepared + static_cast<int64_t>(tile % f.across) * f.stages() * WEIGHTS_BYTES;
    for (int32_t stage = 0; stage < f.stages(); ++stage, ++turn, from += WEIGHTS_BYTES) {
      rings.weights.wait_until_emptied(turn);
      char* to = stages + turn % WEIGHTS * WEIGHTS_BYTES;
      rings.weights.filled[turn % WEIGHTS].arrive_with_block(to, from, WEIGHTS_BYTES);
    }
  }
}

// Where each place of a tile's patch lies in the image, in elements, or -1 for what is beside it: those whose words
// this warp's threads divide, which are all that they need.
__device__ inline void find_places(
    int32_t* offsets, int32_t tile, int32_t mine, int32_t eight, const DividedConvolution& f) {
  const int32_t left = f.left(tile), first = mine + eight * DIVIDED_APART;
  ImagePlace at = f.first_seen(tile, first);
  __syncwarp();  // the last tile's are not needed any more
  for (int32_t i = first; i < PLACES_LOOKED_UP; i += 8 * DIVIDED_APART) {
    offsets[i] = i < f.places() ? f.seen(at, left) : -1;
    f.advance(at, f.next_found);
  }
  __syncwarp();
}

// Where what comes to each place of a tile is written, in elements, or -1 for what is beside the output.
__device__ inline void find_outputs(int32_t* offsets, int32_t tile, int32_t thread, const DividedConvolution& f) {
  const int32_t first = f.first(tile), left = f.left(tile);
  for (int32_t i = thread; i < PATCH_GROUPS * 8; i += DIVIDING)
    offsets[i] = f.made(f.place(first + i / 8 * f.group + i % 8), left);
}

// Every place's eight channels in turn, several read at once.
template <typename Use>
__device__ inline void for_all_places(const float* x, const int32_t* offsets, int32_t mine, int32_t places, Use use) {
  for (int32_t i = mine; i < places; i += DIVIDED_TURN) {
    Vec<float, 4> words[DIVIDED_AT_ONCE][2];
#pragma unroll
    for (int e = 0; e < DIVIDED_AT_ONCE; ++e) {
      const int32_t offset = offsets[i + e * DIVIDED_APART];
#pragma unroll
      for (int h = 0; h < 2; ++h) words[e][h] = offset >= 0 ? load<4>(x + offset + 4 * h) : Vec<float, 4>{};
    }
#pragma unroll
    for (int e = 0; e < DIVIDED_AT_ONCE; ++e) use(i + e * DIVIDED_APART, words[e]);
  }
}

__device__ inline void divide_patches(
    const float* __restrict__ x, char* patches, PatchRings& rings, const DividedConvolution& f) {
  const int32_t thread = threadIdx.x - 32, eight = thread % 8, mine = thread / 8, places = f.places();
  int32_t turn = 0, agreed = 0, number = 0;  // of patches, of their largest words, of tiles
  const auto largest_of_all = [&](float largest) {
    largest = largest_of_warp(largest);
    if (thread % 32 == 0) {
      rings.largest[agreed % 2][thread / 32] = largest;
      rings.agreed.arrive();
    }
    rings.agreed.wait(agreed % 2);
#pragma unroll
    for (int warp = 0; warp < DIVIDING / 32; ++warp) largest = max(largest, rings.largest[agreed % 2][warp]);
    ++agreed;
    return largest;
  };
  for (int32_t tile = blockIdx.x; tile < f.tiles; tile += gridDim.x, ++number) {
    find_places(rings.offsets, tile, mine, eight, f);
    const float* of_thread = x + eight * 8;
    for (int32_t chunk = 0; chunk < f.chunks; ++chunk, ++turn, of_thread += HALF_TERMS) {
      float largest = 0.0f;
      for_all_places(of_thread, rings.offsets, mine, places, [&](int32_t, const Vec<float, 4>(&words)[2]) {
#pragma unroll
        for (int e = 0; e < 8; ++e) largest = max(largest, fabsf(words[e / 4].v[e % 4]));
      });
      largest = largest_of_all(largest);
      if (largest > FLT_MAX) {
        largest = 0.0f;
        for_all_places(of_thread, rings.offsets, mine, places, [&](int32_t, const Vec<float, 4>(&words)[2]) {
          for (int e = 0; e < 8; ++e) largest = larger_finite(largest, words[e / 4].v[e % 4]);
        });
        largest = largest_of_all(largest);
      }
      const HalfScale scale(largest);
      rings.patches.wait_until_emptied(turn);
      if (chunk == 0) find_outputs(rings.outputs[number % 2], tile, thread, f);
      char* patch = patches + turn % PATCHES * PATCH_BYTES + eight * f.apart;
      for_all_places(of_thread, rings.offsets, mine, places, [&](int32_t place, const Vec<float, 4>(&words)[2]) {
        uint4 high, low;
        divide_eight(words, scale.up, high, low);
        if (place >= places) return;
        *reinterpret_cast<uint4*>(patch + place * 16) = high;
        *reinterpret_cast<uint4*>(patch + 8 * f.apart + place * 16) = low;
      });
      if (thread == 0) rings.down[turn % PATCHES] = scale.down;
      show_to_tensor_cores();
      rings.patches.filled[turn % PATCHES].arrive();
    }
  }
}

__device__ inline void multiply_tiles(
    const char* patches, const char* stages, float* __restrict__ y, PatchRings& rings, const DividedConvolution& f) {
  const int32_t thread = threadIdx.x % WARPGROUP, lane = thread % 32, group = (threadIdx.x - DIVIDERS) / WARPGROUP * 16;
  const int32_t row = thread / 32 * 16 + lane / 4;  // and the one eight below: filters
  int32_t turn = 0, patch_turn = 0, number = 0;
  const int32_t first_tile = static_cast<int32_t>(blockIdx.x), step = static_cast<int32_t>(gridDim.x);
  const int32_t turns = (f.tiles - first_tile + step - 1) / step * f.stages();
  // Weights of 32 terms: of the next stage they are fetched while the last products of this one are made.
  uint32_t former[2][2][4], latter[2][2][4];
  const auto fetch = [&](uint32_t(&weights)[2][2][4], int32_t of_turn, int first_step) {
    const uint4* fragments = reinterpret_cast<const uint4*>(stages + of_turn % WEIGHTS * WEIGHTS_BYTES);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 four = fragments[(first_step * 2 + i) * WARPGROUP + thread];
      memcpy(weights[i / 2][i % 2], &four, sizeof(four));
    }
  };
  rings.weights.wait_until_filled(0);
  fetch(former, 0, 0);
  fetch(latter, 0, 2);
  for (int32_t tile = first_tile; tile < f.tiles; tile += step, ++number) {
    float sums[16][4] = {};
    int32_t outputs[2][2];  // lane 4 j + t: of places 2 t and 2 t + 1 of the j-th group, and of the eighth one after it
    for (int32_t chunk = 0; chunk < f.chunks; ++chunk, ++patch_turn) {
      rings.patches.wait_until_filled(patch_turn);
      const char* line = patches + patch_turn % PATCHES * PATCH_BYTES + group * f.group * 16;
      if (chunk == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          outputs[i / 2][i % 2] = rings.outputs[number % 2][(group + i / 2 * 8 + lane / 4) * 8 + lane % 4 * 2 + i % 2];
      const float patch_down = rings.down[patch_turn % PATCHES];
      for (int32_t tap = 0, across = 0; tap < f.taps; ++tap, ++turn) {
        const char* stage = stages + turn % WEIGHTS * WEIGHTS_BYTES;
        const float* of_filters = reinterpret_cast<const float*>(stage + FRAGMENTS_BYTES) + row;
        const float down[2] = {of_filters[0] * patch_down, of_filters[8] * patch_down};
        float part[16][4];
        const auto start = [&](const uint32_t(&weights)[2][2][4], int first_step) {
          begin_products();
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const Pieces high{line, f.group * 16, f.apart, across * 16 + (first_step + s) * 2 * f.apart};
            const Pieces low{line, f.group * 16, f.apart, high.begin + 8 * f.apart};
            multiply_halves<false>(part, weights[s][1], high, first_step + s > 0);
            multiply_halves<false>(part, weights[s][0], low, true);
            multiply_halves<false>(part, weights[s][0], high, true);
          }
          end_of_products();
        };
        start(former, 0);
        start(latter, 2);
        rings.weights.empty(turn);  // whose words are in registers
        const bool goes_on = turn + 1 < turns;
        wait_for_products<1>(part);
        if (goes_on) rings.weights.wait_until_filled(turn + 1);
        if (goes_on) fetch(former, turn + 1, 0);
        wait_for_products(part);
        if (goes_on) fetch(latter, turn + 1, 2);
        if (++across == f.kernel_width) {
          across = 0;
          line += f.pitch * 16;
        }
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
          for (int v = 0; v < 4; ++v) sums[j][v] += part[j][v] * down[v / 2];
      }
      rings.patches.empty(patch_turn);
    }
    float* to = y + tile % f.across * PATCH_FILTERS + row;
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int32_t offset = __shfl_sync(0xffffffffu, outputs[j / 8][e], j % 8 * 4 + lane % 4);
        if (offset >= 0) {
          to[offset] = sums[j][e];
          to[offset + 8] = sums[j][2 + e];
        }
      }
  }
}

__global__ void __launch_bounds__(PATCH_THREADS, 1)
    convolution_of_patches(const float* __restrict__ x, const char* __restrict__ prepared, float* __restrict__ y,
                           DividedConvolution f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ PatchRings rings;
  char* patches = reinterpret_cast<char*>(shared);
  char* weights = patches + PATCHES * PATCH_BYTES;
  if (threadIdx.x == 0) rings.start();
  __syncthreads();
  if (threadIdx.x < DIVIDERS) {
    give_registers<PATCH_DIVIDER_REGISTERS>();
    if (threadIdx.x >= 32)
      divide_patches(x, patches, rings, f);
    else if (threadIdx.x == 0)
      copy_weights(prepared, weights, rings, f);
  } else {
    take_registers<PATCH_MULTIPLIER_REGISTERS>();
    multiply_tiles(patches, weights, y, rings, f);
  }
}

}  // namespace mbc

extern "C" const char* mbc_convolution_of_patches(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<PatchArguments>(call);
  if (const char* problem = unaligned(call)) return problem;
  const DividedConvolution f(a);
  if (f.places() > MOST_PLACES) return "a patch is larger than shared memory";
  char* prepared = out<char>(call, 3);
  const dim3 each(static_cast<unsigned>(f.taps * f.chunks), static_cast<unsigned>(f.across));
  MBC_LAUNCH(prepare_fragments, each, FRAGMENT_THREADS, call.stream, in<float>(call, 1), prepared, f);
  const unsigned blocks = static_cast<unsigned>(f.tiles < multiprocessors() ? f.tiles : multiprocessors());
  constexpr int SHARED = PATCHES * PATCH_BYTES + WEIGHTS * WEIGHTS_BYTES;
  static_assert(SHARED + sizeof(PatchRings) <= 226 << 10);  // as in mbc/kernels/cuda/fp32_emulated/fp32_emulated_halo.py
  MBC_LAUNCH_SHARED(convolution_of_patches, blocks, PATCH_THREADS, SHARED, call.stream, in<float>(call, 0), prepared,
                    out<float>(call, 2), f);
  return launched();
}
// The same; `backward` says that weights are turned.
extern "C" const char* mbc_convolution_backward_data_of_patches(const MbcCall& call) {
  return mbc_convolution_of_patches(call);
}
