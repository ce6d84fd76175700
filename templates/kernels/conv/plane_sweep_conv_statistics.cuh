// Statistics of the result of a convolution that sweeps planes, in its epilogue: of the batch or of each sample.
#pragma once

#include "plane_sweep_conv.cuh"
#include "thread_statistics.cuh"

namespace mbc {

// States of the reductions of `samples`, each by itself: those of a filter are numbered by tile of the sample, then by
// warp.
template <typename State>
struct TileStates {
  State* partial;
  int64_t samples, tiles_of_sample, filters;

  TileStates(void* workspace, const PlaneSweepReductionArguments& a)
      : partial(static_cast<State*>(workspace)), samples(a.samples),
        tiles_of_sample(PlaneSweep(a, a.segment_planes).tiles / a.samples), filters(a.filters) {}
  int64_t parts() const { return tiles_of_sample * SWEEP_WARPS; }
  __device__ int64_t sample(int64_t tile) const { return tile / tiles_of_sample; }
  // Where a warp stores the state of a filter.
  __device__ State* at(int64_t tile, int32_t filter) const {
    const int64_t part = tile % tiles_of_sample * SWEEP_WARPS + threadIdx.x / 32 - WARPGROUP / 32;
    return partial + (part * samples + sample(tile)) * filters + filter;
  }
};

// An epilogue that also computes the statistics of the results.
template <typename T>
struct StatisticsOfTiles {
  static constexpr int TABLE_BYTES = 0;
  TileStates<typename Statistics<T>::State> states;

  template <int UNITS>
  struct Thread : ThreadStatistics<T, 4 * UNITS>, InOneTensor<T> {
    __device__ Thread(const StatisticsOfTiles&, char*, int64_t, int32_t) {}
    __device__ void fetch(const StatisticsOfTiles&, int64_t, const int32_t (&)[2]) {}
    __device__ void push(const StatisticsOfTiles&, const uint32_t (&words)[2 * UNITS], int) {
      const auto element = [&](int e) { return to_float(element_of<T>(words[e / 2], e % 2)); };
      if (this->count == 0) this->begin(element);
      ThreadStatistics<T, 4 * UNITS>::push(element);
    }
    __device__ void finish(const StatisticsOfTiles& f, int64_t tile, int32_t filter) const {
      this->template store<4, 16>([&](int e) { return f.states.at(tile, filter + filter_of_element(e)); });
    }
  };
};

}  // namespace mbc
