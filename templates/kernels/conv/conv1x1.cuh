// 1x1 convolutions at a stride of one, in bf16 and fp16, channels last, with reductions in the epilogue. Bytes limit
// the GEMM, not tensor cores. Therefore it can be recomputed inside the reductions of batch normalization's backward
// pass, which would otherwise read its result. Batch statistics of the forward pass are reduced in the epilogue, too.
//
// GEMM       M = pixels, N = filters, K = channels. With BACKWARD it is the data gradient: `channels` are those of the
//            gradient that is read, `filters` those of the image, and rows of the weights are K (MN-major B).
// Tile       64 pixels x 128 filters; a pipeline stage is 64 pixels of K = 64. A block keeps the weights of its filters
//            and goes from one tile of pixels to the next.
// Warps      640 threads. Warpgroup 0 is the producer: a thread for each consumer copies its pixels (TMA); if the
//            epilogue has other operands, another one stages these, as many tiles ahead as shared memory holds.
//            Warpgroups 1 and 2 are consumers that run at the same time: each on its own tile or, if there are two
//            GEMMs, each on one GEMM of the same tile. wgmma m64n128k16, A and B in shared memory, rows of 128 bytes
//            with swizzle.
//            Warpgroups 3 and 4 are the epilogue: they read rounded results from shared memory, store and reduce them.
// Shared     16,384 bytes of weights for each K = 64, 8,192 for a stage, two results of 16,384, and the staged operands
//            of 64 x 128: 16,384 bytes each, a bit mask 1,024.
// Registers  64 for a producer thread, 104 for each of the others (setmaxnreg).
// Limit      bytes.
//
// Thread (g, t) = (lane / 4, lane % 4) of warp w of a consumer holds, of 64 pixels x 128 filters:
//
//               filters   8j + 2t   8j + 2t + 1      j = 0 .. 15
//   pixel 16w + g         d[j][0]     d[j][1]
//   pixel 16w + g + 8     d[j][2]     d[j][3]
#pragma once

#include "conv1x1_stages.cuh"

namespace mbc {

// Run by one thread for each consumer: copies its share of the weights, which stay at `kept`, then its pixels.
template <int SHARES, typename P, GemmResult M, typename S, typename R>
__device__ inline void produce_tiles(const P& gemm, int32_t consumer, char* kept, const Conv1x1Stages<M, S>& stages,
                                     Conv1x1Pipelines& pipelines, const Conv1x1<M, S, R>& f) {
  constexpr int PARTS = CONV1X1_FILTERS / P::BOX;
  static_assert(PARTS % SHARES == 0 && P::BOX == CONV1X1_PIXELS && P::BOX == CONV1X1_CHANNELS);
  const int32_t chunks = gemm.chunks(), count = f.count();
  pipelines.kept.arrive_expect_tx(PARTS / SHARES * chunks * STAGE_BYTES);
  for (int32_t part = consumer % SHARES; part < PARTS; part += SHARES)
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      const int32_t row = part * P::BOX, filter = f.first_filter() + row, channel = chunk * CONV1X1_CHANNELS;
      char* to = kept + chunk * KEPT_BYTES + row * SWIZZLE_ROW;
      if constexpr (P::BACKWARD)
        tma_load(to, gemm.weights, {filter, channel}, pipelines.kept);
      else
        tma_load(to, gemm.weights, {channel, filter}, pipelines.kept);
    }
  PipelineState state{consumer};
  for (int32_t number = consumer % SHARES; number < count; number += SHARES)
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      pipelines.pixels.producer_acquire(state);
      Barrier& full = pipelines.pixels.full[state.stage];
      full.arrive_expect_tx(STAGE_BYTES);
      tma_load(stages.of_pixels(state), gemm.pixels, {chunk * CONV1X1_CHANNELS, f.first_pixel(number)}, full);
      state.advance(CONV1X1_CONSUMERS, f.stages);
    }
}

template <GemmResult M, typename S, typename R>
__device__ inline void produce_staged(const StagedMaps<M, S>& operands, S source, const Conv1x1Stages<M, S>& stages,
                                      Conv1x1Pipelines& pipelines, const Conv1x1<M, S, R>& f) {
  const int32_t count = f.count();
  PipelineState state{0};
  for (int32_t number = 0; number < count; ++number, state.advance(1, f.staged_tiles)) {
    pipelines.staged.producer_acquire(state);
    Barrier& full = pipelines.staged.full[state.stage];
    full.arrive_expect_tx(STAGED_BYTES<M, S>);
    char* to = stages.of_staged(state);
    int next = 0;
    each_staged<M>(source, [&](const auto* operand) {
      using Element = std::remove_cv_t<std::remove_pointer_t<decltype(operand)>>;
      tma_load(to, operands.maps[next++], {f.first_filter() / PACKED<Element>, f.first_pixel(number)}, full);
      to += CONV1X1_PIXELS * CONV1X1_FILTERS * BITS<Element> / 8;
    });
  }
}

template <int SHARES, typename T, typename P, GemmResult M, typename S, typename R>
__device__ inline void consume_tiles(const P& gemm, int32_t consumer, const char* kept, const Conv1x1Stages<M, S>& stages,
                                     Conv1x1Pipelines& pipelines, const Conv1x1<M, S, R>& f) {
  constexpr bool BACKWARD = P::BACKWARD;
  // One stmatrix stores four matrices of 8 x 8 results: the row whose address this thread supplies, and its eight
  // filters.
  const int32_t lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16, eight = lane / 16;
  const int32_t chunks = gemm.chunks(), count = f.count();
  const SwizzledDescriptor kept_rows(kept), pixel_rows(stages.pixels);
  float sums[CONV1X1_FILTERS / 8][4];
  pipelines.kept.wait(0);
  PipelineState state{consumer}, result{consumer};
  for (int32_t number = consumer % SHARES; number < count; number += SHARES) {
    PipelineState last = state;
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      const SwizzledDescriptor weights = kept_rows.ahead(chunk * KEPT_BYTES);
      const SwizzledDescriptor pixels = pixel_rows.ahead(state.stage * STAGE_BYTES);
      pipelines.pixels.consumer_wait(state);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < CONV1X1_CHANNELS / 16; ++step)
        wgmma_ss<BACKWARD, T>(sums, pixels.ahead(step * 32), weights.ahead(step * (BACKWARD ? 16 * SWIZZLE_ROW : 32)),
                              chunk > 0 || step > 0);
      wgmma_commit();
      if (chunk > 0) {
        wgmma_wait<1>(sums);
        pipelines.pixels.consumer_release(last);
      }
      last = state;
      state.advance(CONV1X1_CONSUMERS, f.stages);
    }
    wgmma_wait(sums);
    pipelines.pixels.consumer_release(last);
    pipelines.results.producer_acquire(result);
    char* to = stages.of_results(result);
#pragma unroll
    for (int j = 0; j < CONV1X1_FILTERS / 8; j += 2)
      stmatrix_x4(to + result_offset(row, eight + j), rounded_word<T>(sums[j]), rounded_word<T>(sums[j] + 2),
                  rounded_word<T>(sums[j + 1]), rounded_word<T>(sums[j + 1] + 2));
    pipelines.results.full[result.stage].arrive();
    result.advance(Conv1x1Pipelines::RESULTS, Conv1x1Pipelines::RESULTS);
  }
}

// The epilogue: a thread stores eight filters of one pixel after another, and reduces the values that the source S
// yields by R. `states`: the states of threads, in shared memory that is free once all results are computed.
template <GemmResult M, typename T, typename S, typename R>
__device__ inline void write_tiles(const Conv1x1Stages<M, S>& stages, Conv1x1Pipelines& pipelines, T* __restrict__ output,
                                    const S& source, const R& r, typename R::State* states,
                                    const Conv1x1<M, S, R>& f) {
  const int32_t thread = threadIdx.x - (1 + CONV1X1_CONSUMERS) * WARPGROUP;
  const int32_t eight = thread % CONV1X1_EIGHTS, mine = thread / CONV1X1_EIGHTS;
  // The offset of results, which are swizzled, from staged operands; it is equal for all pixels of a thread.
  const int32_t exchanged = result_offset(mine, eight) - (mine * RESULT_ROW + eight * 16);
  const int32_t filter = f.first_filter() + eight * 8, count = f.count();
  const bool there = filter < f.filters;
  ThreadReduction<R> sums([&](int j) { return r.load(there ? filter + j : 0); });
  PipelineState state{0}, staged_state{0};
  for (int32_t number = 0; number < count; ++number) {
#pragma unroll
    for (int i = 0; i < GEMMS<M>; ++i) pipelines.results.consumer_wait(state.ahead(i));
    if constexpr (HAS_STAGED<M, S>) pipelines.staged.consumer_wait(staged_state);
    S staged_source = source;
    const auto gemm_result = [&](int i) {
      return reinterpret_cast<const T*>(stages.of_results(state.ahead(i)) + exchanged);
    };
    if constexpr (COMPUTES_X<M>) x_operand(staged_source) = gemm_result(0);
    if constexpr (COMPUTES_GRADIENT<M>) gradient_operand(staged_source) = gemm_result(GEMMS<M> - 1);
    const char* from = stages.of_staged(staged_state);
    each_staged<M>(staged_source, [&](auto*& operand) {
      using Element = std::remove_cv_t<std::remove_reference_t<decltype(*operand)>>;
      operand = reinterpret_cast<const Element*>(from);
      from += CONV1X1_PIXELS * CONV1X1_FILTERS * BITS<Element> / 8;
    });
    const int32_t first = f.first_pixel(number) + mine, left = f.pixels - first;
    const auto fetch = [&](int i) { return staged_source.template fetch<8>((mine + i) * CONV1X1_FILTERS + eight * 8); };
    const auto write = [&](int i, auto& fetched) {
      const int64_t at = static_cast<int64_t>(first + i) * f.filters + filter;
      store_gemm_result<M>(source, output + at, fetched);
      sums.add(r, source, fetched, at);
    };
    const auto begin = [&](const auto& fetched) { sums.begin(r, source, fetched); };
    if (there) each_pixel<CONV1X1_PIXELS, CONV1X1_ROWS, PIXELS_AT_ONCE<S>>(left, mine, fetch, begin, write);
#pragma unroll
    for (int i = 0; i < GEMMS<M>; ++i) pipelines.results.consumer_release(state.ahead(i));
    state.advance(GEMMS<M>, Conv1x1Pipelines::RESULTS);
    if constexpr (HAS_STAGED<M, S>) {
      pipelines.staged.consumer_release(staged_state);
      staged_state.advance(1, f.staged_tiles);
    }
  }
  sums.store_state(r, states + mine * CONV1X1_FILTERS + eight * 8);
}

template <GemmResult M, typename T, typename S, typename R>
__global__ void __launch_bounds__(CONV1X1_THREADS, 1)
    conv1x1(const __grid_constant__ Gemms<M> gemms, const __grid_constant__ StagedMaps<M, S> staged,
            T* __restrict__ output, S source, R r, typename R::State* partial, Conv1x1<M, S, R> f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ Conv1x1Pipelines pipelines;
  constexpr int SHARES = Gemms<M>::SHARES;
  const Conv1x1Stages<M, S> stages(aligned_shared(shared), f);
  auto* states = reinterpret_cast<typename R::State*>(stages.kept);  // reuses weights and stages
  if (threadIdx.x == 0) {
    pipelines.kept.start(CONV1X1_CONSUMERS);
    pipelines.pixels.start(1, 1);
    pipelines.results.start(WARPGROUP, CONV1X1_WRITERS);
    pipelines.staged.start(1, CONV1X1_WRITERS);
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<CONV1X1_PRODUCER_REGISTERS>();
    const int32_t warp = warp_uniform(threadIdx.x / 32);
    if (threadIdx.x % 32 == 0) {
      if (warp < CONV1X1_CONSUMERS) {
        gemms.of(warp, [&](const auto& gemm, int32_t before) {
          produce_tiles<SHARES>(gemm, warp, stages.kept + before * KEPT_BYTES, stages, pipelines, f);
        });
      } else if (HAS_STAGED<M, S> && warp == CONV1X1_CONSUMERS) {
        produce_staged<M>(staged, source, stages, pipelines, f);
      }
    }
    __syncwarp();
  } else if (threadIdx.x < (1 + CONV1X1_CONSUMERS) * WARPGROUP) {
    setmaxnreg_inc<CONV1X1_CONSUMER_REGISTERS>();
    const int32_t consumer = warp_uniform(threadIdx.x / WARPGROUP) - 1;
    gemms.of(consumer, [&](const auto& gemm, int32_t before) {
      consume_tiles<SHARES, T>(gemm, consumer, stages.kept + before * KEPT_BYTES, stages, pipelines, f);
    });
  } else {
    setmaxnreg_inc<CONV1X1_WRITER_REGISTERS>();
    write_tiles<M>(stages, pipelines, output, source, r, states, f);
  }
  if constexpr (REDUCES<R>) {
    __syncthreads();
    const int32_t filter = f.first_filter() + static_cast<int32_t>(threadIdx.x);
    if (threadIdx.x < CONV1X1_FILTERS && filter < f.filters)
      partial[static_cast<int64_t>(f.block_index()) * f.filters + filter] =
          r.combine(CONV1X1_ROWS, [&](unsigned i) { return states[i * CONV1X1_FILTERS + threadIdx.x]; });
  }
}

// The form of a 1x1 convolution by wgmma, for conv1x1_launches.cuh.
struct Conv1x1Wgmma {
  // `output`: where the result is stored, or null. Returns an error from before the launch, or null.
  template <GemmResult M, typename T, typename S, typename R>
  static const char* run(const MbcCall& call, T* output, const S& source, const R& r, typename R::State* partial) {
    const auto& a = arguments<Conv1x1Arguments>(call);
    Gemms<M> gemms;
    if (const char* problem = gemms.template set<T>(call)) return problem;
    StagedMaps<M, S> staged;
    if (const char* problem = staged.set(source, a)) return problem;
    const Conv1x1<M, S, R> f(a, gemms.chunks());
    static_assert(CONV1X1_ROWS % 8 == 0);  // the swizzle is equal for all results of a thread
    MBC_LAUNCH_SHARED((conv1x1<M, T, S, R>), static_cast<unsigned>(a.blocks * f.across), CONV1X1_THREADS,
                      f.shared_bytes(), call.stream, gemms, staged, output, source, r, partial, f);
    if constexpr (REDUCES<R>) merge_all_parts(call.stream, a.blocks, a.filters, partial, r);
    return nullptr;
  }
};

}  // namespace mbc
