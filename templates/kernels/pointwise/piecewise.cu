// Clamp, its gradient, and comparisons with a number, element by element (elementwise.cuh), in place or not.
//
// Bytes      every operand in once, the result out once, 16 bytes at a time where operands are aligned.
// Threads    256 in a grid-stride loop.
// Limit      memory bandwidth.
#include "elementwise.cuh"

namespace mbc {

// NaN is passed on. If the bounds are in the wrong order, the upper one counts.
struct Clamp {
  float lower, upper;
  __device__ float operator()(float x) const {
    const float raised = x < lower ? lower : x;
    return raised > upper ? upper : raised;
  }
};
struct ClampBackward {
  float lower, upper;
  bool strict;
  __device__ float operator()(float x, float dy) const {
    return (strict ? x > lower && x < upper : x >= lower && x <= upper) ? dy : 0.0f;
  }
};
// eq, ne, lt, le, gt, ge, as in comparison.cu.
struct Indicator {
  float value;
  int operation;
  __device__ float operator()(float x) const {
    const bool holds = operation == 0   ? x == value
                       : operation == 1 ? x != value
                       : operation == 2 ? x < value
                       : operation == 3 ? x <= value
                       : operation == 4 ? x > value
                                        : x >= value;
    return holds ? 1.0f : 0.0f;
  }
};

}  // namespace mbc

extern "C" {
const char* mbc_clamp(const MbcCall& call) {
  return mbc::run_one(call, mbc::Clamp{mbc::real(call, 0), mbc::real(call, 1)});
}
const char* mbc_clamp_backward(const MbcCall& call) {
  return mbc::run_two(call, mbc::ClampBackward{mbc::real(call, 0), mbc::real(call, 1), mbc::real(call, 2) != 0.0f});
}
const char* mbc_indicator(const MbcCall& call) {
  return mbc::run_one(call, mbc::Indicator{mbc::real(call, 0), static_cast<int>(mbc::real(call, 1))});
}
}
