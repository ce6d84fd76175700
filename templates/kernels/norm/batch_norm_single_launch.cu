// Batch normalization of small tensors, one launch forward and one backward: statistics and normalization; backward
// reductions and the gradient of x. Channels last.
//
// Bytes      x (and the residual) in, y out; backward x and the gradient in, the gradient of x out. Rows beyond the
//            first few of a thread, which stay in registers, are read twice, the second time mostly from the cache.
// Tile       a thread-block cluster of `parts` blocks (up to 8 from compute capability 9.0; one block before) has a tile
//            of `tile_vectors` vectors of channels, each block a share of the rows.
// Threads    256, `tile_vectors` of them across the channels; sums of a warp by shuffles, of a block in shared memory,
//            of a cluster through distributed shared memory, each in a fixed order.
// Shared     two sums of each warp for the tile's channels, the partial sums that other blocks of the cluster read, and
//            constants of channels.
// Registers  up to four rows of a thread (two with more than two operands) stay in registers between the passes.
// Limit      latency: two or three passes over little data and two cluster barriers; separate launches take longer.
#include "batch_norm_single_launch.cuh"
#include "batch_norm_relu.cuh"
#include "batch_norm_single_launch_operands.h"
#include "batch_norm_single_launch_arguments.h"

namespace mbc {

// `each`: one over the rows.
template <typename T, int N, bool ADD, typename F>
__global__ void __launch_bounds__(THREADS)
    normalize_single_launch(TensorSource<T, ADD, false> source, T* output, int64_t rows, int64_t channels, Normalize forward,
                      float* mean, float* variance, double each, F f) {
  using Channel = Normalize::Channel;
  struct Shared {
    BlockSum<N, 1> sums, squares;
    float centers[MOST_TILE];
    BlockPartial partials[MOST_TILE];
    ChannelTable<Channel, N> table;
  };
  MBC_CLUSTER_SHARED(Shared, shared);
  wait_for_prior_grid();
  const Part<N> part(rows, channels);
  Rows<TensorSource<T, ADD, false>, N> held(source, part);
  const bool owns_channel = part.owns_channel(channels);
  const int64_t own = part.first + part.thread;
  float gamma = 1.0f, beta = 0.0f;
  if (owns_channel && forward.gamma) gamma = forward.gamma[own], beta = forward.beta[own];

  // Shifted data: distances from a thread's first row, so that a mean far from zero costs no digits.
  float shift[N], sum[1][N] = {}, square[1][N] = {};
#pragma unroll
  for (int j = 0; j < N; ++j) shift[j] = part.count > 0 ? source.template first<N>(held.held[0], j) : 0.0f;
  held.all([&](const auto& fetched, int64_t) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float distance = source.template first<N>(fetched, j) - shift[j];
      sum[0][j] += distance;
      square[0][j] = fmaf(distance, distance, square[0][j]);
    }
  });
  const float count = static_cast<float>(part.count), share = count > 0.0f ? 1.0f / count : 0.0f;
  float means[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float distance = sum[0][j] * share;
    square[0][j] -= sum[0][j] * distance;
    means[j] = shift[j] + distance;
    sum[0][j] = count * means[j];
  }
  shared.sums.store_warp_sums(sum);
  __syncthreads();
  if (owns_channel) shared.centers[part.thread] = shared.sums.block_sum(0, part.thread) / part.rows;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float distance = means[j] - shared.centers[threadIdx.x * N + j];
    if (part.count > 0) square[0][j] = fmaf(count * distance, distance, square[0][j]);
  }
  shared.squares.store_warp_sums(square);
  __syncthreads();
  if (owns_channel) shared.partials[part.thread] = {shared.centers[part.thread], shared.squares.block_sum(0, part.thread)};
  cluster_sync();
  if (owns_channel) {
    double total = 0.0, squares = 0.0;
    ClusterPartials(shared, part.thread).each([&](unsigned rank, BlockPartial partial) {
      const auto n = static_cast<double>(PartRange(rows, gridDim.y, rank).size()), center = double{partial.a};
      total += n * center;
      squares += partial.b + n * center * center;
    });
    const double m = total * each, spread = squares * each - m * m;
    const float average = static_cast<float>(m), varies = static_cast<float>(spread > 0.0 ? spread : 0.0);
    if (blockIdx.y == 0) mean[own] = average, variance[own] = varies;
    shared.table.put(part.thread, forward.of(average, varies, gamma, beta));
  }
  cluster_done_reading();
  __syncthreads();
  Channel channel[N];
#pragma unroll
  for (int j = 0; j < N; ++j) channel[j] = shared.table.take(j);
  held.reload();
  held.all([&](const auto& fetched, int64_t at) {
    float y[N];
#pragma unroll
    for (int j = 0; j < N; ++j)
      y[j] = f(channel[j], source.template first<N>(fetched, j), source.template second<N>(fetched, j));
    store_floats(output + at, y);
  });
  cluster_await_readers();
}

// R reduces the values that S reads, x and the gradient of the normalized x; F computes the gradient of x.
template <typename T, int N, typename S, typename R, typename F>
__global__ void __launch_bounds__(THREADS)
    backward_single_launch(S source, T* output, int64_t rows, int64_t channels, R r, F f) {
  using Channel = typename R::Channel;
  using Ready = typename F::Channel;
  struct Shared {
    BlockSum<N, 2> sums;
    BlockPartial partials[MOST_TILE];
    ChannelTable<Channel, N> reduce_table;
    ChannelTable<Ready, N> map_table;
  };
  MBC_CLUSTER_SHARED(Shared, shared);
  wait_for_prior_grid();
  const Part<N> part(rows, channels);
  Rows<S, N> held(source, part);
  const bool owns_channel = part.owns_channel(channels);
  const int64_t own = part.first + part.thread;
  typename F::Prepared prepared{};
  if (owns_channel) {
    shared.reduce_table.put(part.thread, r.load(own));
    prepared = f.prepare(own);
  }
  __syncthreads();
  float sums[2][N] = {};
  {
    Channel channel[N];
#pragma unroll
    for (int j = 0; j < N; ++j) channel[j] = shared.reduce_table.take(j);
    held.all([&](const auto& fetched, int64_t) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        typename R::State state{sums[0][j], sums[1][j]};
        const float x[1] = {source.template first<N>(fetched, j)}, d[1] = {source.template second<N>(fetched, j)};
        r.template push<1>(state, channel[j], x, d);
        sums[0][j] = state.dot;
        sums[1][j] = state.sum;
      }
    });
  }
  shared.sums.store_warp_sums(sums);
  __syncthreads();
  if (owns_channel) shared.partials[part.thread] = {shared.sums.block_sum(0, part.thread), shared.sums.block_sum(1, part.thread)};
  cluster_sync();
  if (owns_channel) {
    double dot = 0.0, sum = 0.0;
    ClusterPartials(shared, part.thread).each([&](unsigned, BlockPartial partial) {
      dot += partial.a;
      sum += partial.b;
    });
    const float dgamma = static_cast<float>(dot * prepared.inverse), dbeta = static_cast<float>(sum);
    if (blockIdx.y == 0) r.keep(own, {dgamma, dbeta});
    shared.map_table.put(part.thread, f.with_sums(prepared, dgamma, dbeta));
  }
  cluster_done_reading();
  __syncthreads();
  Ready ready[N];
#pragma unroll
  for (int j = 0; j < N; ++j) ready[j] = shared.map_table.take(j);
  held.reload();
  held.all([&](const auto& fetched, int64_t at) {
    float dx[N];
#pragma unroll
    for (int j = 0; j < N; ++j)
      dx[j] = f(ready[j], source.template first<N>(fetched, j), source.template second<N>(fetched, j));
    source.template finish<N>(fetched, [](int) { return 0; }, at);
    store_floats(output + at, dx);
  });
  cluster_await_readers();
}

// ADD: a residual is added.
template <bool ADD, typename F>
const char* forward(const MbcCall& call, const BatchNormSingleLaunchOperands& at) {
  const auto& a = arguments<SingleLaunchArguments>(call);
  const Normalize normalize{nullptr, nullptr, at.gamma, at.beta, eps(call, 0)};
  MBC_FOR_TYPE(a.type, T, {
    const TensorSource<T, ADD, false> source{{at.x, at.r}};
    T* y = at.y;
    by_vectors<WIDTH<T>>(a.channels % WIDTH<T> == 0 && source.vectorizable() && aligned(y, 16), [&](auto n) {
      launch_single(call.stream, normalize_single_launch<T, n, ADD, F>, n, a.channels, a.tile_vectors, a.parts, source, y,
                    a.rows, a.channels, normalize, at.mean.as<float>(), at.variance.as<float>(),
                    1.0 / static_cast<double>(a.rows), F{normalize});
    });
  });
  return launched();
}

template <typename T, typename S, typename R, typename F>
void backward(const MbcCall& call, const S& source, T* dx, const R& r, const F& f) {
  const auto& a = arguments<SingleLaunchArguments>(call);
  by_vectors<WIDTH<T>>(a.channels % WIDTH<T> == 0 && source.vectorizable() && aligned(dx, 16), [&](auto n) {
    launch_single(call.stream, backward_single_launch<T, n, S, R, F>, n, a.channels, a.tile_vectors, a.parts, source, dx,
                  a.rows, a.channels, r, f);
  });
}

// The gradient through ReLU, by ReLU's stored output, is written, too. ADD: the gradient is a sum of two.
template <bool ADD>
const char* relu_backward(const MbcCall& call, const BatchNormSingleLaunchOperands& at) {
  const auto& a = arguments<SingleLaunchArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const ReluBackwardSource<T, ADD, true> source{{at.relu}, at.dy, at.dy2, at.x, at.d};
    backward(call, source, at.dx.as<T>(), sums_of(at, eps(call, 0)), normalize_backward(at, eps(call, 0), a.count));
  });
  return launched();
}

}  // namespace mbc

MBC_LAUNCHER(batch_normalize_single_launch, forward<false, Normalize>)
MBC_LAUNCHER(batch_normalize_relu_single_launch, forward<false, NormalizeRelu>)
MBC_LAUNCHER(batch_normalize_add_relu_single_launch, forward<true, NormalizeAddRelu>)

extern "C" const char* mbc_batch_normalize_backward_single_launch(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SingleLaunchArguments>(call);
  const auto at = operands_of_batch_normalize_backward_single_launch(call);
  MBC_FOR_TYPE(a.type, T, {
    const TensorSource<T, true, false> source{{at.x, at.dy}};
    backward(call, source, at.dx.as<T>(), sums_of(at, eps(call, 0)), normalize_backward(at, eps(call, 0), a.count));
  });
  return launched();
}

extern "C" const char* mbc_batch_normalize_relu_backward_single_launch(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SingleLaunchArguments>(call);
  const auto at = operands_of_batch_normalize_relu_backward_single_launch(call);
  const Normalize recomputed = normalize(at, eps(call, 0));
  MBC_FOR_TYPE(a.type, T, {
    const TensorSource<T, true, false> source{{at.x, at.dy}};
    backward(call, source, at.dx.as<T>(), BnReluBackwardReduction<T>(sums_of(at, eps(call, 0)), recomputed),
             NormalizeReluBackward<T>{recomputed, normalize_backward(at, eps(call, 0), a.count)});
  });
  return launched();
}
MBC_LAUNCHER(relu_backward_batch_normalize_single_launch, relu_backward<false>)
MBC_LAUNCHER(add_relu_backward_batch_normalize_single_launch, relu_backward<true>)
