// 1x1 convolutions at a stride of one, in bf16 and fp16, channels last, with reductions in the epilogue. Bytes limit
// the GEMM, not tensor cores: so it can be recomputed inside the reductions of batch normalisation's backward pass,
// which would otherwise read its result. Batch statistics of the forward pass are reduced in the epilogue, too.
//
// GEMM       M = pixels, N = filters, K = channels. With BACKWARD it is the data gradient: `channels` are those of the
//            gradient that is read, `filters` those of the image, and rows of the weights are K (MN-major B).
// Tile       64 pixels x 128 filters; a pipeline stage is 64 pixels of K = 64. A block keeps the weights of its filters
//            and goes from one tile of pixels to the next.
// Warps      640 threads. Warpgroup 0 is the producer: some threads copy pixels for each consumer (cp.async); if the
//            epilogue has other operands, half of the threads stage these, as many tiles ahead as shared memory holds.
//            Warpgroups 1 and 2 are consumers that run at the same time: each on its own tile, or, of two GEMMs, each
//            one GEMM of the same tile. wgmma m64n128k16, A and B in shared memory, rows of 128 bytes with swizzle.
//            Warpgroups 3 and 4 are the epilogue: they read rounded results from shared memory, store and reduce them.
// Shared     16,384 bytes of weights for each K = 64, 8,192 a stage, two results of 16,384, and the staged operands: of
//            64 x 128, 16,384 bytes each, a bit mask 1,024.
// Registers  64 a producer thread, 104 each of the others (setmaxnreg).
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

// 16 bytes of every ROW_STRIDE-th of 64 rows, of which only `left` exist. The usual case, all of them, has a loop of
// its own of few instructions.
template <int ROW_STRIDE, typename Element>
__device__ inline void copy_rows(const Element* from, int32_t row_elements, int32_t left, char* to, int32_t to_stride) {
  if (left > CONV1X1_PIXELS - ROW_STRIDE) {
#pragma unroll
    for (int i = 0; i < CONV1X1_PIXELS / ROW_STRIDE; ++i, from += ROW_STRIDE * row_elements)
      cp_async_16(reinterpret_cast<uint4*>(to + i * to_stride), from, true);
  } else {
    const Element* const first = from;
    for (int i = 0; i < CONV1X1_PIXELS / ROW_STRIDE; ++i, from += ROW_STRIDE * row_elements)
      cp_async_16(reinterpret_cast<uint4*>(to + i * to_stride), i * ROW_STRIDE < left ? from : first, i * ROW_STRIDE < left);
  }
}

// 64 rows of 128 bytes, of which `left` exist, with the swizzle of wgmma: the `sixteen`-th 16 bytes of every
// ROW_STRIDE-th row from `mine` on.
template <int ROW_STRIDE, typename T>
__device__ inline void copy_operand(
    const T* rows, int32_t row_elements, int32_t left, int32_t mine, int32_t sixteen, char* to) {
  constexpr int SAME = 8;  // the swizzle repeats every 8 rows
#pragma unroll
  for (int i = 0; i < SAME; i += ROW_STRIDE) {
    const int32_t row = mine + i;
    copy_rows<SAME>(rows + (left > row ? row : 0) * row_elements + sixteen * 8, row_elements, left - row,
                    to + swizzled_offset(row, sixteen), SAME * SWIZZLE_ROW);
  }
}

// By the warps that copy for one of the consumers: its share of the weights, which stay at `kept`, then its pixels.
template <int SHARES, typename P, GemmResult M, typename S, typename R>
__device__ inline void produce_tiles(const P& gemm, char* kept, const Conv1x1Stages<M, S>& stages,
                                     Conv1x1Pipelines& pipelines, const Conv1x1<M, S, R>& f) {
  constexpr int PRODUCERS = CONV1X1_PRODUCERS<M, S>, ROW_STRIDE = PRODUCERS / 8, PARTS = CONV1X1_FILTERS / CONV1X1_PIXELS;
  static_assert(PARTS % SHARES == 0);
  const int32_t thread = threadIdx.x % PRODUCERS, sixteen = thread % 8, mine = thread / 8;
  const int32_t consumer = warp_uniform(threadIdx.x / PRODUCERS);
  const int32_t channels = gemm.channels, chunks = gemm.chunks(), count = f.count();
  const auto left = [&](int32_t chunk, int32_t rows) {
    return chunk * CONV1X1_CHANNELS + sixteen * 8 < channels ? rows : 0;
  };
  for (int32_t part = consumer % SHARES; part < PARTS; part += SHARES) {
    const int32_t row = part * CONV1X1_PIXELS, filter = f.first_filter() + row, there = filter < f.filters ? filter : 0;
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      const int32_t channel = chunk * CONV1X1_CHANNELS;
      char* to = kept + chunk * KEPT_BYTES + row * SWIZZLE_ROW;
      if constexpr (P::BACKWARD)
        copy_operand<ROW_STRIDE>(gemm.weights + channel * f.filters + there, f.filters,
                            filter + sixteen * 8 < f.filters ? channels - channel : 0, mine, sixteen, to);
      else
        copy_operand<ROW_STRIDE>(gemm.weights + there * channels + channel, channels, left(chunk, f.filters - filter),
                            mine, sixteen, to);
    }
  }
  pipelines.kept.cp_async_arrive();
  PipelineState state{consumer};
  for (int32_t number = consumer % SHARES; number < count; number += SHARES) {
    const int32_t pixel = f.first_pixel(number);
    const auto* from = gemm.pixels + static_cast<int64_t>(pixel) * channels;
    for (int32_t chunk = 0; chunk < chunks; ++chunk, from += CONV1X1_CHANNELS) {
      pipelines.pixels.producer_acquire(state);
      copy_operand<ROW_STRIDE>(from, channels, left(chunk, f.pixels - pixel), mine, sixteen, stages.of_pixels(state));
      pipelines.pixels.full[state.stage].cp_async_arrive();
      state.advance(CONV1X1_CONSUMERS, f.stages);
    }
  }
}

template <GemmResult M, typename S, typename R>
__device__ inline void produce_staged(S source, const Conv1x1Stages<M, S>& stages, Conv1x1Pipelines& pipelines,
                                   const Conv1x1<M, S, R>& f) {
  const int32_t thread = threadIdx.x % STAGING_THREADS, count = f.count();
  PipelineState state{0};
  for (int32_t number = 0; number < count; ++number, state.advance(1, f.staged_tiles)) {
    pipelines.staged.producer_acquire(state);
    const int32_t first = f.first_pixel(number);
    char* to = stages.of_staged(state) + thread * 16;
    each_staged<M>(source, [&](const auto* operand) {
      using Element = std::remove_cv_t<std::remove_pointer_t<decltype(operand)>>;
      constexpr int SIXTEEN = 128 / BITS<Element>, SIXTEENS = CONV1X1_FILTERS / SIXTEEN;  // filters; of a pixel
      constexpr int EACH = 8 * sizeof(Element) / BITS<Element>;                         // filters of what is pointed to
      const int32_t pixel = first + thread / SIXTEENS, filter = f.first_filter() + thread % SIXTEENS * SIXTEEN;
      const int32_t left = filter < f.filters ? f.pixels - pixel : 0;
      const int64_t at = left > 0 ? (static_cast<int64_t>(pixel) * f.filters + filter) / EACH : 0;
      copy_rows<STAGING_THREADS / SIXTEENS>(operand + at, f.filters / EACH, left, to, STAGING_THREADS * 16);
      to += CONV1X1_PIXELS * SIXTEENS * 16;
    });
    pipelines.staged.full[state.stage].cp_async_arrive();
  }
}

template <int SHARES, typename T, typename P, GemmResult M, typename S, typename R>
__device__ inline void consume_tiles(const P& gemm, const char* kept, const Conv1x1Stages<M, S>& stages,
                                       Conv1x1Pipelines& pipelines, const Conv1x1<M, S, R>& f) {
  constexpr bool BACKWARD = P::BACKWARD;
  const int32_t lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane / 4;
  const int32_t consumer = threadIdx.x / WARPGROUP - 1, chunks = gemm.chunks(), count = f.count();
  float sums[CONV1X1_FILTERS / 8][4];
  pipelines.kept.wait(0);
  PipelineState state{consumer}, result{consumer};
  for (int32_t number = consumer % SHARES; number < count; number += SHARES) {
    PipelineState last = state;
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      const char* weights = kept + chunk * KEPT_BYTES;
      const char* pixels = stages.of_pixels(state);
      pipelines.pixels.consumer_wait(state);
      fence_proxy_async();
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < CONV1X1_CHANNELS / 16; ++step)
        wgmma_ss<BACKWARD, T>(sums, pixels + step * 32, weights + step * (BACKWARD ? 16 * SWIZZLE_ROW : 32),
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
    int32_t first = row;
    // Makes the compiler recompute addresses for every tile: registers do not suffice to keep them.
    asm volatile("" : "+r"(first));
    char* to = stages.of_results(result) + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < CONV1X1_FILTERS / 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<uint32_t*>(to + result_offset(first + 8 * h, j)) = rounded_word<T>(sums[j] + 2 * h);
    pipelines.results.full[result.stage].arrive();
    result.advance(Conv1x1Pipelines::RESULTS, Conv1x1Pipelines::RESULTS);
  }
}

// The epilogue: a thread stores eight filters of one pixel after another, and reduces by R what the source S yields.
// `found`: the states of threads, in shared memory that is free once all results are computed.
template <GemmResult M, typename T, typename S, typename R>
__device__ inline void write_tiles(const Conv1x1Stages<M, S>& stages, Conv1x1Pipelines& pipelines, T* __restrict__ output,
                                    const S& source, const R& r, typename R::State* found,
                                    const Conv1x1<M, S, R>& f) {
  constexpr int AT_ONCE = S::OPERANDS > 2 ? 2 : 4;  // pixels
  const int32_t thread = threadIdx.x - (1 + CONV1X1_CONSUMERS) * WARPGROUP;
  const int32_t eight = thread % CONV1X1_EIGHTS, mine = thread / CONV1X1_EIGHTS;
  // The offset by which results, which are swizzled, differ from staged operands; the same for all pixels of a thread.
  const int32_t exchanged = result_offset(mine, eight) - (mine * RESULT_ROW + eight * 16);
  const int32_t filter = f.first_filter() + eight * 8, count = f.count();
  const bool there = filter < f.filters;
  ThreadReduction<R> sums(r, filter, there);
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
    if (there && left > CONV1X1_PIXELS - CONV1X1_ROWS) {
#pragma unroll
      for (int i = 0; i < CONV1X1_PIXELS; i += AT_ONCE * CONV1X1_ROWS) {
        typename S::template Fetched<8> fetched[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) fetched[k] = fetch(i + k * CONV1X1_ROWS);
        sums.begin(r, source, fetched[0]);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) write(i + k * CONV1X1_ROWS, fetched[k]);
      }
    } else if (there) {
      for (int32_t i = 0; i < min(left, CONV1X1_PIXELS - mine); i += CONV1X1_ROWS) {
        auto fetched = fetch(i);
        sums.begin(r, source, fetched);
        write(i, fetched);
      }
    }
#pragma unroll
    for (int i = 0; i < GEMMS<M>; ++i) pipelines.results.consumer_release(state.ahead(i));
    state.advance(GEMMS<M>, Conv1x1Pipelines::RESULTS);
    if constexpr (HAS_STAGED<M, S>) {
      pipelines.staged.consumer_release(staged_state);
      staged_state.advance(1, f.staged_tiles);
    }
  }
  sums.store_state(r, found + mine * CONV1X1_FILTERS + eight * 8);
}

template <GemmResult M, typename T, typename S, typename R>
__global__ void __launch_bounds__(CONV1X1_THREADS, 1)
    conv1x1(Gemms<M, T> gemms, T* __restrict__ output, S source, R r, typename R::State* partial,
              Conv1x1<M, S, R> f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ Conv1x1Pipelines pipelines;
  constexpr int PRODUCERS = CONV1X1_PRODUCERS<M, S>, SHARES = Gemms<M, T>::SHARES;
  const Conv1x1Stages<M, S> stages(aligned_shared(shared), f);
  auto* found = reinterpret_cast<typename R::State*>(stages.kept);  // reuses weights and stages
  if (threadIdx.x == 0) {
    pipelines.kept.start(CONV1X1_CONSUMERS * PRODUCERS);
    pipelines.pixels.start(PRODUCERS, 1);
    pipelines.results.start(WARPGROUP, CONV1X1_WRITERS);
    pipelines.staged.start(STAGING_THREADS, CONV1X1_WRITERS);
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<CONV1X1_PRODUCER_REGISTERS>();
    if (threadIdx.x < CONV1X1_CONSUMERS * PRODUCERS) {
      gemms.of(warp_uniform(threadIdx.x / PRODUCERS), [&](const auto& gemm, int32_t before) {
        produce_tiles<SHARES>(gemm, stages.kept + before * KEPT_BYTES, stages, pipelines, f);
      });
    } else if constexpr (HAS_STAGED<M, S>) {
      produce_staged<M>(source, stages, pipelines, f);
    }
  } else if (threadIdx.x < (1 + CONV1X1_CONSUMERS) * WARPGROUP) {
    setmaxnreg_inc<CONV1X1_CONSUMER_REGISTERS>();
    gemms.of(warp_uniform(threadIdx.x / WARPGROUP - 1), [&](const auto& gemm, int32_t before) {
      consume_tiles<SHARES, T>(gemm, stages.kept + before * KEPT_BYTES, stages, pipelines, f);
    });
  } else {
    setmaxnreg_inc<CONV1X1_WRITER_REGISTERS>();
    write_tiles<M>(stages, pipelines, output, source, r, found, f);
  }
  if constexpr (REDUCES<R>) {
    __syncthreads();
    const int32_t filter = f.first_filter() + static_cast<int32_t>(threadIdx.x);
    if (threadIdx.x < CONV1X1_FILTERS && filter < f.filters)
      partial[static_cast<int64_t>(f.block_index()) * f.filters + filter] =
          r.combine(CONV1X1_ROWS, [&](unsigned i) { return found[i * CONV1X1_FILTERS + threadIdx.x]; });
  }
}

// Pixels and weights of each GEMM come first among the operands.
template <GemmResult M, typename T>
Gemms<M, T> gemms_of(const MbcCall& call) {
  const auto channels = static_cast<int32_t>(arguments<Conv1x1Arguments>(call).channels);
  if constexpr (M == GemmResult::X_AND_GRADIENT) {
    const auto of_gradient = static_cast<int32_t>(arguments<DualConv1x1Arguments>(call).gradient_channels);
    return {{in<T>(call, 0), in<T>(call, 1), channels}, {in<T>(call, 2), in<T>(call, 3), of_gradient}};
  } else {
    return {{in<T>(call, 0), in<T>(call, 1), channels}};
  }
}

// `output`: where the result is stored, if it is.
template <GemmResult M, typename T, typename S, typename R>
void run_conv1x1(const MbcCall& call, T* output, const S& source, const R& r, typename R::State* partial) {
  const auto& a = arguments<Conv1x1Arguments>(call);
  const Gemms<M, T> gemms = gemms_of<M, T>(call);
  const Conv1x1<M, S, R> f(a, gemms.chunks());
  static_assert(CONV1X1_ROWS % 8 == 0);  // the swizzle is the same for all results of a thread
  MBC_LAUNCH_SHARED((conv1x1<M, T, S, R>), static_cast<unsigned>(a.blocks * f.across), CONV1X1_THREADS,
                    f.shared_bytes(), call.stream, gemms, output, source, r, partial, f);
  if constexpr (REDUCES<R>) merge_all_parts(call.stream, a.blocks, a.filters, partial, r);
}

}  // namespace mbc
