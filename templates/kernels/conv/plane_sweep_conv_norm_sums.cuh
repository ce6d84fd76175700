// The sums of the gradient of a norm in the epilogue of data gradients that sweep planes: over the batch or over each sample.
#pragma once

#include "batch_norm.cuh"
#include "plane_sweep_conv_statistics.cuh"

namespace mbc {

// An epilogue of data gradients that also computes the sums of the gradient of a norm, whose result went through a
// (leaky) ReLU to the convolution. Both are recomputed from `x`, the norm's input.
template <typename T>
struct NormSumsOfTiles {
  using State = BnBackwardReduction::State;
  using Channel = Normalize::Channel;
  static constexpr int TABLE_BYTES = sizeof(Channel);
  TileStates<State> states;
  const T* x;
  Normalize normalize;
  float slope;  // of the leaky ReLU; 0 for ReLU

  template <int UNITS>
  struct Thread : InOneTensor<T> {
    const Channel* channels;  // of the thread's filters
    State sums[4 * UNITS] = {};
    uint2 fetched[2][UNITS];

    __device__ Thread(const NormSumsOfTiles& f, char* table, int64_t tile, int32_t filter) {
      auto* const all = reinterpret_cast<Channel*>(table);
      const int32_t lane = threadIdx.x % 32, mine = lane % 4 * 4, first = filter - mine;
      const int64_t before = f.states.sample(tile) * f.states.filters;
      const Normalize& n = f.normalize;
      __syncwarp();
      for (int32_t i = lane; i < 16 * UNITS; i += 32)
        all[i] = n.of(n.mean[before + first + i], n.variance[before + first + i], n.gamma ? n.gamma[first + i] : 1.0f,
                      n.beta ? n.beta[first + i] : 0.0f);
      __syncwarp();
      channels = all + mine;
    }
    // `plane`: the number of the plane's first element.
    __device__ void fetch(const NormSumsOfTiles& f, int64_t plane, const int32_t (&offsets)[2]) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (offsets[h] >= 0)
#pragma unroll
          for (int unit = 0; unit < UNITS; ++unit)
            fetched[h][unit] = *reinterpret_cast<const uint2*>(f.x + plane + offsets[h] + unit * 16);
    }
    __device__ void push(const NormSumsOfTiles& f, const uint32_t (&words)[2 * UNITS], int h) {
#pragma unroll
      for (int e = 0; e < 4 * UNITS; ++e) {
        const Channel channel = channels[filter_of_element(e)];
        const uint2 pair = fetched[h][e / 4];
        const float x = to_float(element_of<T>(e % 4 < 2 ? pair.x : pair.y, e % 2));
        const float dy = to_float(element_of<T>(words[e / 2], e % 2));
        const bool passes = f.normalize(channel, x, 0.0f) > ROUNDS_TO_ZERO<T>;
        const float d = passes ? dy : f.slope == 0.0f ? 0.0f : f.slope * dy;
        sums[e].dot = fmaf(d, x - channel.mean, sums[e].dot);
        sums[e].sum += d;
      }
    }
    __device__ void finish(const NormSumsOfTiles& f, int64_t tile, int32_t filter) const {
#pragma unroll
      for (int e = 0; e < 4 * UNITS; ++e) {
        State all = sums[e];
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) {
          all.dot += __shfl_xor_sync(0xffffffffu, all.dot, mask);
          all.sum += __shfl_xor_sync(0xffffffffu, all.sum, mask);
        }
        if (threadIdx.x % 32 < 4) *f.states.at(tile, filter + filter_of_element(e)) = all;
      }
    }
  };
};

}  // namespace mbc
