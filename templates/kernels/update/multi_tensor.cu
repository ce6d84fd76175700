// One operation (optimizer update, moving average, cast, running statistics) on one tensor or on each of many, in few
// launches: a step has hundreds of parameters, most of them small.
//
// Bytes      SGD: parameter, gradient and momentum in, parameter and momentum out. AdamW: parameter, gradient and two
//            moments in, all but the gradient out. Moving average: the average and the averaged tensor in, the average
//            out. All fp32, 16 bytes at a time if aligned.
// Tile       tensors are cut into chunks of 4,096 elements, one for each block. A launch takes up to `MOST_TENSORS` = 64
//            tensors, as many as fit into kernel arguments; a block finds its tensor by bisection.
// Threads    256, four vectors of four elements each.
// Limit      memory bandwidth.
//
// Integers of a call: the structure, then `FIELDS` integers for every tensor: its elements, then the numbers of the
// pointers to its operands.
#include "multi_tensor.cuh"

namespace mbc {

// Updates are in place.
struct Updated {
  float *p[MOST_TENSORS], *a[MOST_TENSORS], *b[MOST_TENSORS];
  const float* g[MOST_TENSORS];
};

template <typename Rule>
__global__ void multi_tensor_update(Chunks chunks, Updated all, const MbcControl* control,
                                    typename Rule::Settings settings) {
  const Rule rule(settings, control);
  const int n = chunks.tensor();
  const Tensor t{all.p[n], all.g[n], all.a[n], all.b[n], all.p[n], all.a[n], all.b[n]};
  update_chunk(t, rule, chunks.begin(n), chunks.end(n));
}

template <typename Rule>
const char* run_rule(const MbcCall& call, const typename Rule::Settings& settings) {
  return run_updates<3 + Rule::READS>(
      call, multi_tensor_update<Rule>, settings, [](Updated& all, int slot, const int64_t* own, auto at) {
        all.p[slot] = at(own[1]);
        all.g[slot] = at(own[2]);
        all.a[slot] = Rule::READS > 0 ? at(own[3]) : nullptr;
        all.b[slot] = Rule::READS > 1 ? at(own[4]) : nullptr;
      });
}

template <typename From, typename To>
struct Cast {
  const From* from[MOST_TENSORS];
  To* to[MOST_TENSORS];
};

template <typename From, typename To>
__global__ void multi_tensor_cast(Chunks chunks, Cast<From, To> all) {
  constexpr int N = 4;
  const int n = chunks.tensor();
  const From* x = all.from[n];
  To* y = all.to[n];
  const int64_t begin = chunks.begin(n), end = chunks.end(n);
  const bool wide = reinterpret_cast<uintptr_t>(x) % (N * sizeof(From)) == 0 &&
                    reinterpret_cast<uintptr_t>(y) % (N * sizeof(To)) == 0;
  const int64_t last = wide ? end / N : begin / N;
#pragma unroll 4
  for (int64_t i = begin / N + threadIdx.x; i < last; i += THREADS) {
    const Vec<From, N> from = load<N>(x + i * N);
    Vec<To, N> to;
#pragma unroll
    for (int j = 0; j < N; ++j) to.v[j] = from_float<To>(to_float(from.v[j]));
    store(y + i * N, to);
  }
  for (int64_t i = last * N + threadIdx.x; i < end; i += THREADS) y[i] = from_float<To>(to_float(x[i]));
}

template <typename From, typename To>
const char* run_casts(const MbcCall& call, const MultiTensorCastArguments& a) {
  Cast<From, To> all{};
  for_each_launch<3>(
      behind<MultiTensorCastArguments>(call), a.tensors,
      [&](int slot, int, const int64_t* own) {
        all.from[slot] = in<From>(call, static_cast<int>(own[1]));
        all.to[slot] = out<To>(call, static_cast<int>(own[2]));
      },
      [&](const Chunks& chunks, uint32_t blocks) {
        MBC_LAUNCH((multi_tensor_cast<From, To>), blocks, THREADS, call.stream, chunks, all);
      });
  return launched();
}

struct Running {
  float *mean[MOST_TENSORS], *variance[MOST_TENSORS];
  const float *new_mean[MOST_TENSORS], *new_variance[MOST_TENSORS];
  float momentum[MOST_TENSORS], unbias[MOST_TENSORS];
};

__global__ void multi_tensor_update_running(Chunks chunks, Running all, const MbcControl* control) {
  if (control->proceed == 0) return;
  const int n = chunks.tensor();
  const float momentum = all.momentum[n], unbias = all.unbias[n];
  for (int64_t c = chunks.begin(n) + threadIdx.x; c < chunks.end(n); c += THREADS) {
    const float mean = all.mean[n][c], variance = all.variance[n][c];
    all.mean[n][c] = mean + momentum * (all.new_mean[n][c] - mean);
    all.variance[n][c] = variance + momentum * (all.new_variance[n][c] * unbias - variance);
  }
}

}  // namespace mbc

extern "C" const char* mbc_multi_tensor_sgd(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<MultiTensorUpdateArguments>(call);
  const SgdSettings settings = sgd_settings(call, a.nesterov != 0);
  return a.momentum ? run_rule<Sgd<true>>(call, settings) : run_rule<Sgd<false>>(call, settings);
}

extern "C" const char* mbc_multi_tensor_adamw(const MbcCall& call) {
  using namespace mbc;
  return run_rule<Adamw>(call, adamw_settings(call));
}

extern "C" const char* mbc_multi_tensor_ema(const MbcCall& call) {
  using namespace mbc;
  return run_rule<Ema>(call, ema_settings(call));
}

extern "C" const char* mbc_multi_tensor_accumulate(const MbcCall& call) {
  using namespace mbc;
  return run_rule<Accumulate>(call, {});
}

extern "C" const char* mbc_multi_tensor_cast(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<MultiTensorCastArguments>(call);
#if MBC_WORKING != 0
  if (a.from_type == MBC_FP32 && a.to_type == MBC_WORKING) return run_casts<float, MbcWorking>(call, a);
  if (a.from_type == MBC_WORKING && a.to_type == MBC_FP32) return run_casts<MbcWorking, float>(call, a);
#endif
  return a.from_type == MBC_FP32 && a.to_type == MBC_FP32 ? run_casts<float, float>(call, a)
                                                           : "element type is not in this library";
}

// The field after the pointers is the number of values in a channel's statistics. Reals: the momentum of every tensor.
extern "C" const char* mbc_multi_tensor_update_running(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<MultiTensorUpdateArguments>(call);
  Running all{};
  const auto at = [&](int64_t index) { return out<float>(call, static_cast<int>(index)); };
  for_each_launch<6>(
      behind<MultiTensorUpdateArguments>(call), a.tensors,
      [&](int slot, int number, const int64_t* own) {
        all.mean[slot] = at(own[1]), all.variance[slot] = at(own[2]);
        all.new_mean[slot] = at(own[3]), all.new_variance[slot] = at(own[4]);
        all.momentum[slot] = static_cast<float>(call.reals[number]);
        all.unbias[slot] =
            own[5] > 1 ? static_cast<float>(static_cast<double>(own[5]) / static_cast<double>(own[5] - 1)) : 1.0f;
      },
      [&](const Chunks& chunks, uint32_t blocks) {
        MBC_LAUNCH(multi_tensor_update_running, blocks, THREADS, call.stream, chunks, all,
                   in<MbcControl>(call, static_cast<int>(a.control)));
      });
  return launched();
}
