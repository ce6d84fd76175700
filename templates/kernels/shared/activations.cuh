// Activations and their gradients as functors of one element, which maps and fused kernels are instantiated with.
#pragma once

#include "device.cuh"

namespace mbc {

__device__ inline float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

struct Silu {
  __device__ float operator()(float x) const { return x * logistic(x); }
};
constexpr float INVERSE_SQRT_2 = 0.70710678118654752f, INVERSE_SQRT_2PI = 0.39894228040143268f;
// erfc rather than 1 + erf: the left tail keeps its digits.
struct Gelu {
  __device__ float operator()(float x) const { return 0.5f * x * erfcf(-x * INVERSE_SQRT_2); }
};
// Comparisons are written so that a NaN comes through.
struct Relu6 {
  __device__ float operator()(float x) const { return x < 0.0f ? 0.0f : x > 6.0f ? 6.0f : x; }
};
struct HardSigmoid {
  __device__ float operator()(float x) const { return Relu6{}(x + 3.0f) / 6.0f; }
};
struct HardSwish {
  __device__ float operator()(float x) const { return x * HardSigmoid{}(x); }
};

// The first operand is y for relu6, x for the others; the second is dy.
struct SiluBackward {
  __device__ float operator()(float x, float dy) const {
    const float s = logistic(x);
    return dy * s * (1.0f + x * (1.0f - s));
  }
};
struct GeluBackward {
  __device__ float operator()(float x, float dy) const {
    return dy * (0.5f * erfcf(-x * INVERSE_SQRT_2) + x * INVERSE_SQRT_2PI * expf(-0.5f * x * x));
  }
};
struct Relu6Backward {
  __device__ float operator()(float y, float dy) const { return y > 0.0f && y < 6.0f ? dy : 0.0f; }
};
struct HardSwishBackward {
  __device__ float operator()(float x, float dy) const {
    return dy * (x <= -3.0f ? 0.0f : x < 3.0f ? x / 3.0f + 0.5f : 1.0f);
  }
};

}  // namespace mbc
