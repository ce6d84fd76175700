// The end of a step: whether it counts, and the new parameters. Control block, parameters and optimizer state are
// updated where they are: input and output are the same bytes.
#include "mbc_control.h"
#include "mbc_device.cuh"

// Followed by the number of elements of every gradient, `gradients` integers.
struct GuardArguments {
  int64_t scaled;  // the loss scale is dynamic (fp16)
  int64_t gradients;
};

struct SgdUpdateArguments {
  int64_t elements;
  int64_t momentum;  // whether there is a velocity
  int64_t nesterov;
};

struct AdamwUpdateArguments {
  int64_t elements;
};

namespace mbc {

constexpr int TENSORS = 64;  // looked at by one launch; the kernel's arguments hold the list

struct Tensors {
  const float* data[TENSORS];
  int64_t elements[TENSORS];
};

__global__ void clear_flag(uint32_t* flag) { *flag = 0; }

// One row of blocks a tensor. Every block that finds something writes the same value, so the order does not matter.
__global__ void find_nonfinite(Tensors tensors, uint32_t* flag) {
  const float* data = tensors.data[blockIdx.y];
  const int64_t elements = tensors.elements[blockIdx.y], stride = thread_count();
  const bool wide = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const int64_t vectors = wide ? elements / 4 : 0;
  bool finite = true;
  for (int64_t i = thread_index(); i < vectors; i += stride) {
    const Vec<float, 4> v = load<4>(data + i * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) finite = finite && isfinite(v.v[j]);
  }
  for (int64_t i = vectors * 4 + thread_index(); i < elements; i += stride) finite = finite && isfinite(data[i]);
  if (!finite) *flag = 1;
}

__global__ void decide(const MbcControl* before, MbcControl* after, const float* loss, const uint32_t* flag,
                       bool scaled) {
  MbcControl control = *before;
  const bool proceed = isfinite(loss[0]) && (flag == nullptr || *flag == 0);
  control.proceed = proceed ? 1 : 0;
  control.gradient_scale = control.loss_scale;  // what this step's gradients carry, before the scale changes
  if (proceed) {
    ++control.updates;
    ++control.since_growth;
  } else {
    ++control.skipped;
  }
  if (scaled && !proceed) {
    control.loss_scale *= MBC_SCALE_BACKOFF;
    control.since_growth = 0;
  } else if (scaled && control.since_growth >= MBC_GROWTH_INTERVAL) {
    control.loss_scale *= MBC_SCALE_GROWTH;
    control.since_growth = 0;
  }
  *after = control;
}

// Runs `f(p, g, a, b)` for every element, four at a time where they are aligned; STATES of a, b exist. The new values
// are written whether or not the step proceeds, so that input and output need not be the same bytes.
template <int STATES, typename F>
__device__ inline void update(const float* p, const float* g, const float* a, const float* b, float* p_out,
                              float* a_out, float* b_out, int64_t vectors, int64_t elements, F f) {
  const int64_t stride = thread_count();
  for (int64_t i = thread_index(); i < vectors; i += stride) {
    Vec<float, 4> vp = load<4>(p + i * 4), va{}, vb{};
    const Vec<float, 4> vg = load<4>(g + i * 4);
    if constexpr (STATES > 0) va = load<4>(a + i * 4);
    if constexpr (STATES > 1) vb = load<4>(b + i * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) f(vp.v[j], vg.v[j], va.v[j], vb.v[j]);
    store(p_out + i * 4, vp);
    if constexpr (STATES > 0) store(a_out + i * 4, va);
    if constexpr (STATES > 1) store(b_out + i * 4, vb);
  }
  for (int64_t i = vectors * 4 + thread_index(); i < elements; i += stride) {
    float ep = p[i], ea = STATES > 0 ? a[i] : 0.0f, eb = STATES > 1 ? b[i] : 0.0f;
    f(ep, g[i], ea, eb);
    p_out[i] = ep;
    if constexpr (STATES > 0) a_out[i] = ea;
    if constexpr (STATES > 1) b_out[i] = eb;
  }
}

struct SgdSettings {
  float momentum, weight_decay;
  bool nesterov;
};

template <bool MOMENTUM>
__global__ void sgd(const float* p, const float* g, const MbcControl* control, const float* velocity, float* p_out,
                    float* velocity_out, int64_t vectors, int64_t elements, SgdSettings settings) {
  const bool proceed = control->proceed != 0;
  const float rate = static_cast<float>(control->learning_rate), unscale = 1.0f / control->gradient_scale;
  update<MOMENTUM ? 1 : 0>(p, g, velocity, nullptr, p_out, velocity_out, nullptr, vectors, elements,
                           [=](float& parameter, float gradient, float& v, float&) {
                             if (!proceed) return;
                             float step = gradient * unscale + settings.weight_decay * parameter;
                             if constexpr (MOMENTUM) {
                               v = settings.momentum * v + step;
                               step = settings.nesterov ? step + settings.momentum * v : v;
                             }
                             parameter -= rate * step;
                           });
}

struct AdamwSettings {
  double beta1, beta2, eps, weight_decay;
};

__global__ void adamw(const float* p, const float* g, const MbcControl* control, const float* m, const float* v,
                      float* p_out, float* m_out, float* v_out, int64_t vectors, int64_t elements,
                      AdamwSettings settings) {
  __shared__ float shared[3];
  if (threadIdx.x == 0) {
    // In fp64 and once a block: 1 - beta^n loses its digits in fp32.
    const double rate = control->learning_rate, updates = static_cast<double>(control->updates);
    shared[0] = static_cast<float>(rate / (1.0 - pow(settings.beta1, updates)));
    shared[1] = static_cast<float>(1.0 / sqrt(1.0 - pow(settings.beta2, updates)));
    shared[2] = static_cast<float>(1.0 - rate * settings.weight_decay);
  }
  __syncthreads();
  const bool proceed = control->proceed != 0;
  const float rate = shared[0], widen = shared[1], keep = shared[2], unscale = 1.0f / control->gradient_scale;
  const float beta1 = static_cast<float>(settings.beta1), beta2 = static_cast<float>(settings.beta2);
  const float rest1 = static_cast<float>(1.0 - settings.beta1), rest2 = static_cast<float>(1.0 - settings.beta2);
  const float eps = static_cast<float>(settings.eps);
  update<2>(p, g, m, v, p_out, m_out, v_out, vectors, elements,
            [=](float& parameter, float gradient, float& first, float& second) {
              if (!proceed) return;
              const float step = gradient * unscale;
              first = beta1 * first + rest1 * step;
              second = beta2 * second + rest2 * (step * step);
              parameter = keep * parameter - rate * (first / (sqrtf(second) * widen + eps));
            });
}

inline bool all_aligned(const MbcCall& call, int count) {
  for (int i = 0; i < count; ++i)
    if (i != 2 && !aligned(call.pointers[i], 16)) return false;  // 2: the control block
  return true;
}

}  // namespace mbc

extern "C" const char* mbc_guard(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GuardArguments>(call);
  const int64_t* elements = call.integers + sizeof(GuardArguments) / sizeof(int64_t);
  const int count = static_cast<int>(a.gradients);
  uint32_t* flag = count > 0 ? out<uint32_t>(call, count + 3) : nullptr;
  if (count > 0) MBC_LAUNCH(clear_flag, 1, 1, call.stream, flag);
  for (int done = 0; done < count; done += TENSORS) {
    Tensors tensors{};
    const int some = count - done < TENSORS ? count - done : TENSORS;
    int64_t most = 0;
    for (int i = 0; i < some; ++i) {
      tensors.data[i] = in<float>(call, 2 + done + i);
      tensors.elements[i] = elements[done + i];
      if (elements[done + i] > most) most = elements[done + i];
    }
    const int64_t wanted = divide_up(most, THREADS * 4 * 4), cap = multiprocessors();
    const dim3 grid(static_cast<unsigned>(wanted < cap ? wanted : cap), static_cast<unsigned>(some));
    MBC_LAUNCH(find_nonfinite, grid, THREADS, call.stream, tensors, flag);
  }
  MBC_LAUNCH(decide, 1, 1, call.stream, in<MbcControl>(call, 0), out<MbcControl>(call, count + 2), in<float>(call, 1),
             flag, a.scaled != 0);
  return launched();
}

extern "C" const char* mbc_sgd_update(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SgdUpdateArguments>(call);
  const SgdSettings settings{static_cast<float>(call.reals[0]), static_cast<float>(call.reals[1]), a.nesterov != 0};
  const int64_t vectors = all_aligned(call, a.momentum ? 6 : 4) ? a.elements / 4 : 0;
  const unsigned blocks = blocks_for(vectors > 0 ? vectors : a.elements);
  const float *p = in<float>(call, 0), *g = in<float>(call, 1), *none = nullptr;
  const auto* control = in<MbcControl>(call, 2);
  float* nothing = nullptr;
  if (a.momentum)
    MBC_LAUNCH((sgd<true>), blocks, THREADS, call.stream, p, g, control, in<float>(call, 3), out<float>(call, 4),
               out<float>(call, 5), vectors, a.elements, settings);
  else
    MBC_LAUNCH((sgd<false>), blocks, THREADS, call.stream, p, g, control, none, out<float>(call, 3), nothing, vectors,
               a.elements, settings);
  return launched();
}

extern "C" const char* mbc_adamw_update(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<AdamwUpdateArguments>(call);
  const AdamwSettings settings{call.reals[0], call.reals[1], call.reals[2], call.reals[3]};
  const int64_t vectors = all_aligned(call, 8) ? a.elements / 4 : 0;
  MBC_LAUNCH(adamw, blocks_for(vectors > 0 ? vectors : a.elements), THREADS, call.stream, in<float>(call, 0),
             in<float>(call, 1), in<MbcControl>(call, 2), in<float>(call, 3), in<float>(call, 4), out<float>(call, 5),
             out<float>(call, 6), out<float>(call, 7), vectors, a.elements, settings);
  return launched();
}
