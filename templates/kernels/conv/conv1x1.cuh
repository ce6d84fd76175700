// Convolutions of one place at a step of one, in bf16 and fp16, channels last: a product, [pixels, channels] by
// [channels, filters]. It takes next to nothing, what it writes takes the time. So it can be made again along with the
// sums of batch normalisation's backward pass, which would read its result: they get it on the way, as it is written.
// So do the batch statistics, when it is made.
//
// BACKWARD, the product is the gradient of the image: `channels` are those of the gradient that is read, `filters`
// those of the image, and weights lie term by term. Sums over what comes of it get it in the same way.
//
// A block keeps the weights of its filters and makes tiles of pixels one after another. One warpgroup copies pixels and
// what the sums are made of beside results, some tiles ahead. Two multiply at the same time, of one product a tile
// each, of two a product each of the same tile, and two write what has been made and sum up.
#pragma once

#include "conv1x1_stages.cuh"

namespace mbc {

// 16 bytes of every APART-th of 64 rows, of which only `left` are there. Most often all are: then it takes few
// instructions, and copies are many.
template <int APART, typename Element>
__device__ inline void copy_rows(const Element* from, int32_t row_elements, int32_t left, char* to, int32_t to_apart) {
  if (left > POINT_PIXELS - APART) {
#pragma unroll
    for (int i = 0; i < POINT_PIXELS / APART; ++i, from += APART * row_elements)
      copy_16_bytes(reinterpret_cast<uint4*>(to + i * to_apart), from, true);
  } else {
    const Element* const first = from;
    for (int i = 0; i < POINT_PIXELS / APART; ++i, from += APART * row_elements)
      copy_16_bytes(reinterpret_cast<uint4*>(to + i * to_apart), i * APART < left ? from : first, i * APART < left);
  }
}

// 64 rows of 128 bytes, of which `left` are there, or none that this thread copies, as tensor cores want them: the
// `sixteen`-th 16 bytes of every APART-th row from `mine` on.
template <int APART, typename T>
__device__ inline void copy_operand(
    const T* rows, int32_t row_elements, int32_t left, int32_t mine, int32_t sixteen, char* to) {
  constexpr int SAME = 8;  // rows that lie alike
#pragma unroll
  for (int i = 0; i < SAME; i += APART) {
    const int32_t row = mine + i;
    copy_rows<SAME>(rows + (left > row ? row : 0) * row_elements + sixteen * 8, row_elements, left - row,
                    to + operand_offset(row, sixteen), SAME * OPERAND_ROW);
  }
}

// For one of the multipliers, by some warps of its own, and its share of the weights, which are `kept` there.
template <int SHARES, typename P, Makes M, typename S, typename R>
__device__ inline void copy_points(const P& product, char* kept, const PointStages<M, S>& stages, PointRings& rings,
                                   const Pointwise<M, S, R>& f) {
  constexpr int COPIERS = POINT_COPIERS<M, S>, APART = COPIERS / 8, PARTS = POINT_FILTERS / POINT_PIXELS;
  static_assert(PARTS % SHARES == 0);
  const int32_t thread = threadIdx.x % COPIERS, sixteen = thread % 8, mine = thread / 8;
  const int32_t multiplier = warps_own(threadIdx.x / COPIERS);
  const int32_t channels = product.channels, chunks = product.chunks(), count = f.count();
  const auto left = [&](int32_t chunk, int32_t rows) {
    return chunk * POINT_CHANNELS + sixteen * 8 < channels ? rows : 0;
  };
  for (int32_t part = multiplier % SHARES; part < PARTS; part += SHARES) {
    const int32_t row = part * POINT_PIXELS, filter = f.first_filter() + row, there = filter < f.filters ? filter : 0;
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      const int32_t channel = chunk * POINT_CHANNELS;
      char* to = kept + chunk * KEPT_BYTES + row * OPERAND_ROW;
      if constexpr (P::BACKWARD)
        copy_operand<APART>(product.weights + channel * f.filters + there, f.filters,
                            filter + sixteen * 8 < f.filters ? channels - channel : 0, mine, sixteen, to);
      else
        copy_operand<APART>(product.weights + there * channels + channel, channels, left(chunk, f.filters - filter),
                            mine, sixteen, to);
    }
  }
  rings.kept.arrive_with_copies();
  Turn turn{multiplier};
  for (int32_t number = multiplier % SHARES; number < count; number += SHARES) {
    const int32_t pixel = f.first_pixel(number);
    const auto* from = product.pixels + static_cast<int64_t>(pixel) * channels;
    for (int32_t chunk = 0; chunk < chunks; ++chunk, from += POINT_CHANNELS) {
      rings.pixels.wait_until_emptied(turn);
      copy_operand<APART>(from, channels, left(chunk, f.pixels - pixel), mine, sixteen, stages.of_pixels(turn));
      rings.pixels.filled[turn.stage].arrive_with_copies();
      turn.advance(POINT_MULTIPLIERS, f.stages);
    }
  }
}

template <Makes M, typename S, typename R>
__device__ inline void copy_beside(S source, const PointStages<M, S>& stages, PointRings& rings,
                                   const Pointwise<M, S, R>& f) {
  const int32_t thread = threadIdx.x % BESIDE_COPIERS, count = f.count();
  Turn turn{0};
  for (int32_t number = 0; number < count; ++number, turn.advance(1, f.besides)) {
    rings.beside.wait_until_emptied(turn);
    const int32_t first = f.first_pixel(number);
    char* to = stages.of_beside(turn) + thread * 16;
    each_beside<M>(source, [&](const auto* operand) {
      using Element = std::remove_cv_t<std::remove_pointer_t<decltype(operand)>>;
      constexpr int SIXTEEN = 128 / BITS<Element>, SIXTEENS = POINT_FILTERS / SIXTEEN;  // filters; of a pixel
      constexpr int EACH = 8 * sizeof(Element) / BITS<Element>;                         // filters of what is pointed to
      const int32_t pixel = first + thread / SIXTEENS, filter = f.first_filter() + thread % SIXTEENS * SIXTEEN;
      const int32_t left = filter < f.filters ? f.pixels - pixel : 0;
      const int64_t at = left > 0 ? (static_cast<int64_t>(pixel) * f.filters + filter) / EACH : 0;
      copy_rows<BESIDE_COPIERS / SIXTEENS>(operand + at, f.filters / EACH, left, to, BESIDE_COPIERS * 16);
      to += POINT_PIXELS * SIXTEENS * 16;
    });
    rings.beside.filled[turn.stage].arrive_with_copies();
  }
}

template <int SHARES, typename T, typename P, Makes M, typename S, typename R>
__device__ inline void multiply_points(const P& product, const char* kept, const PointStages<M, S>& stages,
                                       PointRings& rings, const Pointwise<M, S, R>& f) {
  constexpr bool BACKWARD = P::BACKWARD;
  const int32_t lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane / 4;
  const int32_t multiplier = threadIdx.x / WARPGROUP - 1, chunks = product.chunks(), count = f.count();
  float sums[POINT_FILTERS / 8][4];
  rings.kept.wait(0);
  Turn turn{multiplier}, result{multiplier};
  for (int32_t number = multiplier % SHARES; number < count; number += SHARES) {
    Turn last = turn;
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      const char* weights = kept + chunk * KEPT_BYTES;
      const char* pixels = stages.of_pixels(turn);
      rings.pixels.wait_until_filled(turn);
      show_to_tensor_cores();
      begin_products();
#pragma unroll
      for (int step = 0; step < POINT_CHANNELS / 16; ++step)
        multiply_shared<BACKWARD, T>(sums, pixels + step * 32, weights + step * (BACKWARD ? 16 * OPERAND_ROW : 32),
                                     chunk > 0 || step > 0);
      end_of_products();
      if (chunk > 0) {
        wait_for_products<1>(sums);
        rings.pixels.empty(last);
      }
      last = turn;
      turn.advance(POINT_MULTIPLIERS, f.stages);
    }
    wait_for_products(sums);
    rings.pixels.empty(last);
    rings.results.wait_until_emptied(result);
    int32_t first = row;
    // Where results go is found anew for every tile: compilers would keep addresses, for which registers do not last.
    asm volatile("" : "+r"(first));
    char* to = stages.of_results(result) + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < POINT_FILTERS / 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<uint32_t*>(to + result_offset(first + 8 * h, j)) = rounded_word<T>(sums[j] + 2 * h);
    rings.results.filled[result.stage].arrive();
    result.advance(PointRings::RESULTS, PointRings::RESULTS);
  }
}

// A thread writes eight filters of one pixel after another, and sums up what R makes of what S has of them.
// `found`: its sums, in shared memory that nobody needs when all results are there.
template <Makes M, typename T, typename S, typename R>
__device__ inline void write_points(const PointStages<M, S>& stages, PointRings& rings, T* __restrict__ made,
                                    const S& source, const R& r, typename R::State* found,
                                    const Pointwise<M, S, R>& f) {
  constexpr int AT_ONCE = S::OPERANDS > 2 ? 2 : 4;  // pixels
  const int32_t thread = threadIdx.x - (1 + POINT_MULTIPLIERS) * WARPGROUP;
  const int32_t eight = thread % POINT_EIGHTS, mine = thread / POINT_EIGHTS;
  // Results lie like what is beside them, but for this, which is the same for all pixels of a thread.
  const int32_t exchanged = result_offset(mine, eight) - (mine * RESULT_ROW + eight * 16);
  const int32_t filter = f.first_filter() + eight * 8, count = f.count();
  const bool there = filter < f.filters;
  EightSums<R> sums(r, filter, there);
  Turn turn{0}, turn_beside{0};
  for (int32_t number = 0; number < count; ++number) {
#pragma unroll
    for (int i = 0; i < PRODUCTS<M>; ++i) rings.results.wait_until_filled(turn.behind(i));
    if constexpr (BESIDE<M, S>) rings.beside.wait_until_filled(turn_beside);
    S near = source;
    const auto product = [&](int i) {
      return reinterpret_cast<const T*>(stages.of_results(turn.behind(i)) + exchanged);
    };
    if constexpr (MAKES_X<M>) x_of(near) = product(0);
    if constexpr (MAKES_GRADIENT<M>) gradient_of(near) = product(PRODUCTS<M> - 1);
    const char* from = stages.of_beside(turn_beside);
    each_beside<M>(near, [&](auto*& operand) {
      using Element = std::remove_cv_t<std::remove_reference_t<decltype(*operand)>>;
      operand = reinterpret_cast<const Element*>(from);
      from += POINT_PIXELS * POINT_FILTERS * BITS<Element> / 8;
    });
    const int32_t first = f.first_pixel(number) + mine, left = f.pixels - first;
    const auto fetch = [&](int i) { return near.template fetch<8>((mine + i) * POINT_FILTERS + eight * 8); };
    const auto write = [&](int i, auto& fetched) {
      const int64_t at = static_cast<int64_t>(first + i) * f.filters + filter;
      write_product<M>(source, made + at, fetched);
      sums.add(r, source, fetched, at);
    };
    if (there && left > POINT_PIXELS - POINT_ROWS) {
#pragma unroll
      for (int i = 0; i < POINT_PIXELS; i += AT_ONCE * POINT_ROWS) {
        typename S::template Fetched<8> fetched[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) fetched[k] = fetch(i + k * POINT_ROWS);
        sums.begin(r, source, fetched[0]);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) write(i + k * POINT_ROWS, fetched[k]);
      }
    } else if (there) {
      for (int32_t i = 0; i < min(left, POINT_PIXELS - mine); i += POINT_ROWS) {
        auto fetched = fetch(i);
        sums.begin(r, source, fetched);
        write(i, fetched);
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PRODUCTS<M>; ++i) rings.results.empty(turn.behind(i));
    turn.advance(PRODUCTS<M>, PointRings::RESULTS);
    if constexpr (BESIDE<M, S>) {
      rings.beside.empty(turn_beside);
      turn_beside.advance(1, f.besides);
    }
  }
  sums.leave(r, found + mine * POINT_FILTERS + eight * 8);
}

template <Makes M, typename T, typename S, typename R>
__global__ void __launch_bounds__(POINT_THREADS, 1)
    pointwise(Products<M, T> products, T* __restrict__ made, S source, R r, typename R::State* partial,
              Pointwise<M, S, R> f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ PointRings rings;
  constexpr int COPIERS = POINT_COPIERS<M, S>, SHARES = Products<M, T>::SHARES;
  const PointStages<M, S> stages(aligned_shared(shared), f);
  auto* found = reinterpret_cast<typename R::State*>(stages.kept);  // and of pixels
  if (threadIdx.x == 0) {
    rings.kept.start(POINT_MULTIPLIERS * COPIERS);
    rings.pixels.start(COPIERS, 1);
    rings.results.start(WARPGROUP, POINT_WRITERS);
    rings.beside.start(BESIDE_COPIERS, POINT_WRITERS);
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    give_registers<POINT_COPIER_REGISTERS>();
    if (threadIdx.x < POINT_MULTIPLIERS * COPIERS) {
      products.of(warps_own(threadIdx.x / COPIERS), [&](const auto& product, int32_t before) {
        copy_points<SHARES>(product, stages.kept + before * KEPT_BYTES, stages, rings, f);
      });
    } else if constexpr (BESIDE<M, S>) {
      copy_beside<M>(source, stages, rings, f);
    }
  } else if (threadIdx.x < (1 + POINT_MULTIPLIERS) * WARPGROUP) {
    take_registers<POINT_MULTIPLIER_REGISTERS>();
    products.of(warps_own(threadIdx.x / WARPGROUP - 1), [&](const auto& product, int32_t before) {
      multiply_points<SHARES, T>(product, stages.kept + before * KEPT_BYTES, stages, rings, f);
    });
  } else {
    take_registers<POINT_WRITER_REGISTERS>();
    write_points<M>(stages, rings, made, source, r, found, f);
  }
  if constexpr (SUMMING<R>) {
    __syncthreads();
    const int32_t filter = f.first_filter() + static_cast<int32_t>(threadIdx.x);
    if (threadIdx.x < POINT_FILTERS && filter < f.filters)
      partial[static_cast<int64_t>(f.place()) * f.filters + filter] =
          r.merged(POINT_ROWS, [&](unsigned i) { return found[i * POINT_FILTERS + threadIdx.x]; });
  }
}

// Pixels and weights of each product are the first operands.
template <Makes M, typename T>
Products<M, T> products_of(const MbcCall& call) {
  const auto channels = static_cast<int32_t>(arguments<PointwiseArguments>(call).channels);
  if constexpr (M == Makes::BOTH) {
    const auto of_gradient = static_cast<int32_t>(arguments<PointwisePairArguments>(call).gradient_channels);
    return {{in<T>(call, 0), in<T>(call, 1), channels}, {in<T>(call, 2), in<T>(call, 3), of_gradient}};
  } else {
    return {{in<T>(call, 0), in<T>(call, 1), channels}};
  }
}

// made: where the product goes, if it is written.
template <Makes M, typename T, typename S, typename R>
void run_pointwise(const MbcCall& call, T* made, const S& source, const R& r, typename R::State* partial) {
  const auto& a = arguments<PointwiseArguments>(call);
  const Products<M, T> products = products_of<M, T>(call);
  const Pointwise<M, S, R> f(a, products.chunks());
  static_assert(POINT_ROWS % 8 == 0);  // so that a thread finds all its results alike
  MBC_LAUNCH_SHARED((pointwise<M, T, S, R>), static_cast<unsigned>(a.blocks * f.across), POINT_THREADS,
                    f.shared_bytes(), call.stream, products, made, source, r, partial, f);
  if constexpr (SUMMING<R>) merge_all_parts(call.stream, a.blocks, a.filters, partial, r);
}

}  // namespace mbc
