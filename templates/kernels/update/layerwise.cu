// LARS and LAMB: the ratio of norms that scales the step of each parameter, and the step, for one tensor or many.
//
// Bytes      lars_ratio: parameter and gradient in. lars_update: parameter, gradient and momentum in, parameter and momentum
//            out. lamb_ratio: parameter, gradient and two moments in, the moments out. lamb_update: parameter and moments
//            in, parameter out. All fp32, 16 bytes at a time where aligned.
// Tile       a tensor is cut into `parts`, one for each block; a launch takes up to `MOST` = 32 tensors, a row of blocks each.
// Reduction  a block writes two sums of squares of its part in fp64; one block for each tensor adds them in order. The
//            number of parts depends only on the sizes, so that every GPU gets the same bits.
// Threads    256.
// Limit      memory bandwidth.
#include "mbc_control.h"
#include "optimizer.cuh"
#include "square_sums.cuh"
#include "layerwise_arguments.h"

namespace mbc {

constexpr int MOST = 32;
constexpr int FIELDS = 10;

struct Layers {
  const float *p[MOST], *g[MOST], *a[MOST], *b[MOST];
  float *p_out[MOST], *a_out[MOST], *b_out[MOST], *ratio[MOST];
  int64_t elements[MOST];
  int64_t first[MOST];  // where the sums of a tensor's parts begin
  int32_t parts[MOST];
};

// Two sums of squares.
struct Sums {
  double x, y;
};

// The two sums of a block, as in `sum_of_block`.
__device__ inline Sums sums_of_block(Sums own) {
  const double x = sum_of_block(own.x);
  __syncthreads();  // both sums use the same shared memory
  return {x, sum_of_block(own.y)};
}

// Rules as in optimizer.cuh, whose operator takes `ratio` and `sums`, too. Rules of ratios add to `sums`, and compute the
// ratio from two norms by `ratio_of(settings, x, y)`.
struct LarsRatioSettings {
  double trust, eps, weight_decay, clip_value;
};

struct LarsRatio : Touches<0, true, false> {
  using Settings = LarsRatioSettings;
  float unscale, limit;

  __device__ LarsRatio(const Settings& settings, const MbcControl* control)
      : unscale(1.0f / control->gradient_scale), limit(static_cast<float>(settings.clip_value)) {}
  __device__ void operator()(float& p, float g, float&, float&, float, Sums& sums) const {
    sums.x += square(p);
    sums.y += square(clipped(g * unscale, limit));
  }
  __device__ static double ratio_of(const Settings& s, double p, double g) {
    return p > 0 && g > 0 ? s.trust * p / (g + s.weight_decay * p + s.eps) : 1.0;
  }
};

template <bool MOMENTUM>
struct LarsUpdate : Touches<MOMENTUM ? 1 : 0> {
  using Settings = SgdSettings;
  Settings settings;
  float rate, unscale;
  bool proceed;

  __device__ LarsUpdate(const Settings& given, const MbcControl* control)
      : settings(given), rate(static_cast<float>(control->learning_rate * given.rate)),
        unscale(1.0f / control->gradient_scale), proceed(control->proceed != 0) {}
  __device__ void operator()(float& p, float g, float& velocity, float&, float ratio, Sums&) const {
    if (!proceed) return;
    float step = (clipped(g * unscale, settings.clip_value) + settings.weight_decay * p) * ratio;
    if constexpr (MOMENTUM) {
      velocity = settings.momentum * velocity + step;
      step = settings.nesterov ? step + settings.momentum * velocity : velocity;
    }
    p -= rate * step;
  }
};

// The step of LAMB before the ratio is applied.
struct LambStep {
  float correct, widen, eps, weight_decay;

  __device__ LambStep(const AdamwSettings& settings, const MbcControl* control) {
    __shared__ float shared[2];
    if (threadIdx.x == 0) {
      // In fp64 and once for each block: 1 - beta^n loses its digits in fp32.
      const double updates = static_cast<double>(control->updates);
      shared[0] = static_cast<float>(1.0 / (1.0 - pow(settings.beta1, updates)));
      shared[1] = static_cast<float>(1.0 / sqrt(1.0 - pow(settings.beta2, updates)));
    }
    __syncthreads();
    correct = shared[0], widen = shared[1];
    eps = static_cast<float>(settings.eps), weight_decay = static_cast<float>(settings.weight_decay);
  }
  __device__ float operator()(float p, float first, float second) const {
    return correct * (first / (sqrtf(second) * widen + eps)) + weight_decay * p;
  }
};

struct LambRatio : Touches<2, true, false> {
  using Settings = AdamwSettings;
  LambStep step;
  float unscale, limit, beta1, beta2, rest1, rest2;
  bool proceed;

  __device__ LambRatio(const Settings& settings, const MbcControl* control)
      : step(settings, control), unscale(1.0f / control->gradient_scale), limit(static_cast<float>(settings.clip_value)),
        beta1(static_cast<float>(settings.beta1)), beta2(static_cast<float>(settings.beta2)),
        rest1(static_cast<float>(1.0 - settings.beta1)), rest2(static_cast<float>(1.0 - settings.beta2)),
        proceed(control->proceed != 0) {}
  __device__ void operator()(float& p, float gradient, float& first, float& second, float, Sums& sums) const {
    if (!proceed) return;
    const float g = clipped(gradient * unscale, limit);
    first = beta1 * first + rest1 * g;
    second = beta2 * second + rest2 * (g * g);
    sums.x += square(p);
    sums.y += square(step(p, first, second));
  }
  __device__ static double ratio_of(const Settings&, double p, double step) {
    return p > 0 && step > 0 ? p / step : 1.0;
  }
};

struct LambUpdate : Touches<2, false, true, 0> {
  using Settings = AdamwSettings;
  LambStep step;
  float rate;
  bool proceed;

  __device__ LambUpdate(const Settings& settings, const MbcControl* control)
      : step(settings, control), rate(static_cast<float>(control->learning_rate * settings.rate)),
        proceed(control->proceed != 0) {}
  __device__ void operator()(float& p, float, float& first, float& second, float ratio, Sums&) const {
    if (proceed) p -= rate * ratio * step(p, first, second);
  }
};

// One part of one tensor. `READS_RATIO`: the rule applies a ratio; otherwise it computes the sums for one.
template <typename Rule, bool READS_RATIO>
__global__ void run_parts(Layers layers, const MbcControl* control, typename Rule::Settings settings, Sums* sums) {
  const int n = static_cast<int>(blockIdx.y), parts = layers.parts[n];
  if (static_cast<int>(blockIdx.x) >= parts) return;
  const Rule rule(settings, control);
  const Tensor t{layers.p[n], layers.g[n], layers.a[n], layers.b[n], layers.p_out[n], layers.a_out[n], layers.b_out[n]};
  const float ratio = READS_RATIO ? layers.ratio[n][0] : 1.0f;
  const int64_t elements = layers.elements[n], stride = static_cast<int64_t>(parts) * THREADS;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const uintptr_t written = reinterpret_cast<uintptr_t>(t.p_out) | reinterpret_cast<uintptr_t>(t.a_out) |
                            reinterpret_cast<uintptr_t>(t.b_out);
  const int64_t vectors = t.wide(written) ? elements / 4 : 0;
  Sums own{0, 0};
  const auto step = [&](float& p, float g, float& a, float& b) { rule(p, g, a, b, ratio, own); };
  update<Rule>(t, step, start, vectors, vectors * 4 + start, elements, stride);
  if constexpr (!READS_RATIO) {
    own = sums_of_block(own);
    if (threadIdx.x == 0) sums[layers.first[n] + blockIdx.x] = own;
  }
}

// A block for each tensor.
template <typename Rule>
__global__ void write_ratios(Layers layers, const MbcControl* control, typename Rule::Settings settings,
                             const Sums* sums) {
  const int n = static_cast<int>(blockIdx.x);
  Sums own{0, 0};
  for (int i = static_cast<int>(threadIdx.x); i < layers.parts[n]; i += THREADS) {
    own.x += sums[layers.first[n] + i].x;
    own.y += sums[layers.first[n] + i].y;
  }
  own = sums_of_block(own);
  if (threadIdx.x != 0) return;
  const double ratio = control->proceed != 0 ? Rule::ratio_of(settings, sqrt(own.x), sqrt(own.y)) : 1.0;
  layers.ratio[n][0] = static_cast<float>(ratio);
}

// Divides the tensors of a call among launches: `launch(layers, count, most parts of one tensor)`.
template <typename Launch>
const char* for_layers(const MbcCall& call, Launch launch) {
  const auto& a = arguments<LayerwiseArguments>(call);
  const int64_t* fields = behind<LayerwiseArguments>(call);
  const auto at = [&](int64_t index) { return index < 0 ? nullptr : out<float>(call, static_cast<int>(index)); };
  int64_t first = 0;
  for (int64_t done = 0; done < a.tensors; done += MOST) {
    const int some = static_cast<int>(a.tensors - done < MOST ? a.tensors - done : MOST);
    Layers layers{};
    int64_t most = 1;
    for (int i = 0; i < some; ++i) {
      const int64_t* own = fields + (done + i) * FIELDS;
      layers.elements[i] = own[0], layers.parts[i] = static_cast<int32_t>(own[1]), layers.first[i] = first;
      layers.p[i] = at(own[2]), layers.g[i] = at(own[3]), layers.a[i] = at(own[4]), layers.b[i] = at(own[5]);
      layers.p_out[i] = at(own[6]), layers.a_out[i] = at(own[7]), layers.b_out[i] = at(own[8]);
      layers.ratio[i] = at(own[9]);
      first += own[1];
      if (own[1] > most) most = own[1];
    }
    launch(layers, static_cast<unsigned>(some), static_cast<unsigned>(most));
  }
  return launched();
}

template <typename Rule>
const char* run_ratios(const MbcCall& call, const typename Rule::Settings& settings) {
  const auto* control = in<MbcControl>(call, static_cast<int>(arguments<LayerwiseArguments>(call).control));
  auto* sums = out<Sums>(call, static_cast<int>(call.pointer_count) - 1);
  return for_layers(call, [&](const Layers& layers, unsigned count, unsigned parts) {
    MBC_LAUNCH((run_parts<Rule, false>), dim3(parts, count), THREADS, call.stream, layers, control, settings, sums);
    MBC_LAUNCH((write_ratios<Rule>), count, THREADS, call.stream, layers, control, settings, sums);
  });
}

template <typename Rule>
const char* run_steps(const MbcCall& call, const typename Rule::Settings& settings) {
  const auto* control = in<MbcControl>(call, static_cast<int>(arguments<LayerwiseArguments>(call).control));
  return for_layers(call, [&](const Layers& layers, unsigned count, unsigned parts) {
    MBC_LAUNCH((run_parts<Rule, true>), dim3(parts, count), THREADS, call.stream, layers, control, settings,
               static_cast<Sums*>(nullptr));
  });
}

inline const char* lars_ratios(const MbcCall& call) {
  return run_ratios<LarsRatio>(call, {call.reals[0], call.reals[1], call.reals[2], call.reals[3]});
}

inline const char* lars_updates(const MbcCall& call) {
  const auto& a = arguments<LayerwiseArguments>(call);
  const SgdSettings settings = sgd_settings(call, a.nesterov != 0);
  return a.momentum != 0 ? run_steps<LarsUpdate<true>>(call, settings) : run_steps<LarsUpdate<false>>(call, settings);
}

}  // namespace mbc

// Operations on one parameter use these launchers, too.
extern "C" const char* mbc_multi_tensor_lars_ratio(const MbcCall& call) { return mbc::lars_ratios(call); }
extern "C" const char* mbc_multi_tensor_lars_update(const MbcCall& call) { return mbc::lars_updates(call); }
extern "C" const char* mbc_multi_tensor_lamb_ratio(const MbcCall& call) {
  return mbc::run_ratios<mbc::LambRatio>(call, mbc::adamw_settings(call));
}
extern "C" const char* mbc_multi_tensor_lamb_update(const MbcCall& call) {
  return mbc::run_steps<mbc::LambUpdate>(call, mbc::adamw_settings(call));
}
