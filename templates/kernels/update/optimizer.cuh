// Optimizer rules (SGD, AdamW), the moving average and the sum over mini-batches as functors, and their loop over a
// range of a tensor.
#pragma once

#include "mbc_control.h"
#include "device.cuh"

namespace mbc {

// A parameter, its gradient and up to two states; the new values may be the same bytes. Null if a rule has none.
struct Tensor {
  const float *p, *g, *a, *b;
  float *p_out, *a_out, *b_out;

  // Whether what is read begins at multiples of 16 bytes, and `more` addresses, too.
  __device__ bool wide(uintptr_t more = 0) const {
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(p) | reinterpret_cast<uintptr_t>(g) |
                                reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
    return (addresses | more) % 16 == 0;
  }
};

// A rule says what it reads and writes (`Touches`), and has `Settings`, a constructor from the settings and the control
// block that all threads of a block run together, and `operator()(p, g, a, b)` for one element. In a skipped step the
// values do not change, but they are still stored, because outputs need not be the inputs' memory.
template <int STATES, bool READS_GRADIENT = true, bool WRITES_PARAMETER = true, int WRITTEN = STATES>
struct Touches {
  static constexpr bool GRADIENT = READS_GRADIENT, PARAMETER = WRITES_PARAMETER;
  static constexpr int READS = STATES, WRITES = WRITTEN;
};

// Runs `step`, the operator of `Rule`, from vector `first` in steps of `stride` up to `last`, and over the elements from
// `begin` to `end`, either of which may be different for every thread.
template <typename Rule, typename Step>
__device__ inline void update(const Tensor& t, const Step& step, int64_t first, int64_t last, int64_t begin,
                              int64_t end, int64_t stride) {
  for (int64_t i = first; i < last; i += stride) {
    Vec<float, 4> vp = load<4>(t.p + i * 4), vg{}, va{}, vb{};
    if constexpr (Rule::GRADIENT) vg = load<4>(t.g + i * 4);
    if constexpr (Rule::READS > 0) va = load<4>(t.a + i * 4);
    if constexpr (Rule::READS > 1) vb = load<4>(t.b + i * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) step(vp.v[j], vg.v[j], va.v[j], vb.v[j]);
    if constexpr (Rule::PARAMETER) store(t.p_out + i * 4, vp);
    if constexpr (Rule::WRITES > 0) store(t.a_out + i * 4, va);
    if constexpr (Rule::WRITES > 1) store(t.b_out + i * 4, vb);
  }
  for (int64_t i = begin; i < end; i += stride) {
    float ep = t.p[i], ea = Rule::READS > 0 ? t.a[i] : 0.0f, eb = Rule::READS > 1 ? t.b[i] : 0.0f;
    step(ep, Rule::GRADIENT ? t.g[i] : 0.0f, ea, eb);
    if constexpr (Rule::PARAMETER) t.p_out[i] = ep;
    if constexpr (Rule::WRITES > 0) t.a_out[i] = ea;
    if constexpr (Rule::WRITES > 1) t.b_out[i] = eb;
  }
}

// A gradient without its scale, in [-limit, limit]; a limit of 0: no limit. NaN stays NaN.
__device__ inline float clipped(float gradient, float limit) {
  if (limit == 0.0f) return gradient;
  return gradient > limit ? limit : gradient < -limit ? -limit : gradient;
}

// `rate`: a factor of the step's learning rate.
struct SgdSettings {
  float momentum, weight_decay, clip_value;
  double rate;
  bool nesterov;
};

inline SgdSettings sgd_settings(const MbcCall& call, bool nesterov) {
  return {static_cast<float>(call.reals[0]), static_cast<float>(call.reals[1]), static_cast<float>(call.reals[3]),
          call.reals[2], nesterov};
}

template <bool MOMENTUM>
struct Sgd : Touches<MOMENTUM ? 1 : 0> {
  using Settings = SgdSettings;
  Settings settings;
  float rate, unscale;
  bool proceed;

  __device__ Sgd(const Settings& given, const MbcControl* control)
      : settings(given), rate(static_cast<float>(control->learning_rate * given.rate)), unscale(1.0f / control->gradient_scale),
        proceed(control->proceed != 0) {}
  __device__ void operator()(float& parameter, float gradient, float& velocity, float&) const {
    if (!proceed) return;
    float step = clipped(gradient * unscale, settings.clip_value) + settings.weight_decay * parameter;
    if constexpr (MOMENTUM) {
      velocity = settings.momentum * velocity + step;
      step = settings.nesterov ? step + settings.momentum * velocity : velocity;
    }
    parameter -= rate * step;
  }
};

struct AdamwSettings {
  double beta1, beta2, eps, weight_decay, rate, clip_value;
};

inline AdamwSettings adamw_settings(const MbcCall& call) {
  return {call.reals[0], call.reals[1], call.reals[2], call.reals[3], call.reals[4], call.reals[5]};
}

struct Adamw : Touches<2> {
  using Settings = AdamwSettings;
  float rate, widen, keep, unscale, limit, beta1, beta2, rest1, rest2, eps;
  bool proceed;

  __device__ Adamw(const Settings& settings, const MbcControl* control) {
    __shared__ float shared[3];
    if (threadIdx.x == 0) {
      // In fp64 and once for each block: 1 - beta^n loses its digits in fp32.
      const double given = control->learning_rate * settings.rate, updates = static_cast<double>(control->updates);
      shared[0] = static_cast<float>(given / (1.0 - pow(settings.beta1, updates)));
      shared[1] = static_cast<float>(1.0 / sqrt(1.0 - pow(settings.beta2, updates)));
      shared[2] = static_cast<float>(1.0 - given * settings.weight_decay);
    }
    __syncthreads();
    rate = shared[0], widen = shared[1], keep = shared[2];
    unscale = 1.0f / control->gradient_scale, limit = static_cast<float>(settings.clip_value);
    beta1 = static_cast<float>(settings.beta1), beta2 = static_cast<float>(settings.beta2);
    rest1 = static_cast<float>(1.0 - settings.beta1), rest2 = static_cast<float>(1.0 - settings.beta2);
    eps = static_cast<float>(settings.eps);
    proceed = control->proceed != 0;
  }
  __device__ void operator()(float& parameter, float gradient, float& first, float& second) const {
    if (!proceed) return;
    const float step = clipped(gradient * unscale, limit);
    first = beta1 * first + rest1 * step;
    second = beta2 * second + rest2 * (step * step);
    parameter = keep * parameter - rate * (first / (sqrtf(second) * widen + eps));
  }
};

struct EmaSettings {
  double decay;
};

inline EmaSettings ema_settings(const MbcCall& call) { return {call.reals[0]}; }

// The moving average takes the parameter's place, the averaged tensor that of the gradient.
struct Ema : Touches<0> {
  using Settings = EmaSettings;
  float rest;
  bool proceed, first;

  __device__ Ema(const Settings& settings, const MbcControl* control)
      : rest(static_cast<float>(1.0 - settings.decay)), proceed(control->proceed != 0), first(control->updates <= 1) {}
  __device__ void operator()(float& average, float value, float&, float&) const {
    if (!proceed) return;
    average = first ? value : average + rest * (value - average);
  }
};

struct AccumulateSettings {};

// The sum over earlier mini-batches takes the parameter's place, the value of this mini-batch that of the gradient. The
// first mini-batch of a step has no earlier sum.
struct Accumulate : Touches<0> {
  using Settings = AccumulateSettings;
  bool first;

  __device__ Accumulate(const Settings&, const MbcControl* control) : first(control->accumulated == 0) {}
  __device__ void operator()(float& sum, float value, float&, float&) const { sum = first ? value : sum + value; }
};

}  // namespace mbc
