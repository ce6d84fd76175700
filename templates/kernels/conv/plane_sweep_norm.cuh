// A prologue of convolutions that sweep planes: a norm and a (leaky) ReLU of the image, whose result is never stored.
//
// Threads    a producer thread transforms in shared memory the chunks of 16 bytes that it copied itself, so that only the
//            consumers wait for it. Copies of half of the stages are under way while it transforms an earlier plane.
//            Chunks outside of the image stay zero.
// Registers  mean, scale and shift of the eight channels that all chunks of a thread have.
#pragma once

#include "batch_norm.cuh"
#include "plane_sweep.cuh"

namespace mbc {

struct NormActivation {
  Normalize normalize;
  float slope;                       // of the leaky ReLU; 0 for ReLU
  int32_t rows_of_sample, channels;  // all rows are one sample if statistics are those of the batch

  template <typename T, int EIGHTS, int STAGES>
  class Thread {
   public:
    __device__ Thread(const NormActivation& f_, Pipeline<STAGES>& pipeline_, char* stages_, int32_t stage_bytes_, int32_t first_channel)
        : f(f_), pipeline(pipeline_), stages(stages_), stage_bytes(stage_bytes_),
          first(first_channel + static_cast<int32_t>(threadIdx.x) % WARPGROUP % EIGHTS * 8) {}
    __device__ void begin(const SweepTile& tile, const BoxCopy<T, EIGHTS>& copy) {
      const int32_t next = static_cast<int32_t>(tile.row) / f.rows_of_sample;
      if (next != sample) {
        finish();
        sample = next;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const Normalize& n = f.normalize;
          const int32_t c = first + e, at = sample * f.channels + c;
          of_channels[e] = n.of(n.mean[at], n.variance[at], n.gamma ? n.gamma[c] : 1.0f, n.beta ? n.beta[c] : 0.0f);
        }
      }
#pragma unroll
      for (int i = 0; i < COUNT; ++i) places[i] = copy.place(i);  // the same for all tiles
    }
    __device__ void started(int32_t, const BoxCopy<T, EIGHTS>& copy, bool exists) {
      cp_async_commit();
      waiting |= static_cast<uint64_t>(exists ? copy.chunks_inside() : 0) << COUNT * planes++;
      if (planes <= AHEAD) return;
      cp_async_wait<AHEAD>();
      complete();
    }
    // Completes all planes that were started.
    __device__ void finish() {
      cp_async_wait<0>();
      while (planes > 0) complete();
    }

   private:
    static constexpr int COUNT = BoxCopy<T, EIGHTS>::COUNT, AHEAD = STAGES / 2;
    static_assert(COUNT * (AHEAD + 1) <= 64);

    __device__ void complete() {
      char* const box = stages + iteration % STAGES * stage_bytes;
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
        if (waiting >> i & 1) {
          auto* const at = reinterpret_cast<T*>(box + places[i]);
          const auto x = hold<8>(at);
          Held<T, 8> y;
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float pair[2] = {activated(2 * w, to_float(x[2 * w])), activated(2 * w + 1, to_float(x[2 * w + 1]))};
            y.words[w] = rounded_word<T>(pair);
          }
          *reinterpret_cast<Held<T, 8>*>(at) = y;
        }
      fence_proxy_async();  // before wgmma of the threads that wait for the plane
      pipeline.full[iteration++ % STAGES].arrive();
      waiting >>= COUNT;
      --planes;
    }
    __device__ float activated(int e, float x) const {
      const float z = f.normalize(of_channels[e], x, 0.0f);
      return z < 0.0f ? (f.slope == 0.0f ? 0.0f : f.slope * z) : z;
    }

    const NormActivation& f;
    Pipeline<STAGES>& pipeline;
    char* const stages;
    const int32_t stage_bytes, first;   // bytes; the thread's first channel
    int32_t sample = -1, iteration = 0;  // the next plane to complete
    int32_t planes = 0;                  // that were started and are not complete
    uint64_t waiting = 0;                // a bit for each chunk of these planes that is in the image
    int32_t places[COUNT];
    Normalize::Channel of_channels[8];
  };
};

// Of operands by name, which `O` has. Reals: eps of the norm, the slope of the leaky ReLU.
template <typename O, typename Arguments>
NormActivation norm_activation(const MbcCall& call, const O& at, const Arguments& a) {
  return {normalize(at, eps(call, 0)), real(call, 1), narrow(a.rows / a.samples), narrow(a.channels)};
}

}  // namespace mbc
