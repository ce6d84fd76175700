// Elementary functions and their gradients, element by element (elementwise.cuh), in place or not. They have a file of
// their own, so that networks without them compile less.
//
// Bytes      every operand in once, the result out once, 16 bytes at a time where operands are aligned.
// Threads    256 in a grid-stride loop.
// Limit      memory bandwidth; for powers with exponents other than 2 and -1 the special function units.
#include "elementwise.cuh"

namespace mbc {

struct Sqrt {
  __device__ float operator()(float x) const { return sqrtf(x); }
};
struct SqrtBackward {
  __device__ float operator()(float y, float dy) const { return dy / (2.0f * y); }
};
struct Abs {
  __device__ float operator()(float x) const { return fabsf(x); }
};
struct AbsBackward {
  __device__ float operator()(float x, float dy) const { return x > 0.0f ? dy : x < 0.0f ? -dy : 0.0f * x; }
};
struct Exp {
  __device__ float operator()(float x) const { return expf(x); }
};
struct ExpBackward {
  __device__ float operator()(float y, float dy) const { return dy * y; }
};
struct Log {
  __device__ float operator()(float x) const { return logf(x); }
};
struct LogBackward {
  __device__ float operator()(float x, float dy) const { return dy / x; }
};

struct Pow {
  float exponent;
  __device__ float operator()(float x) const { return power(x, exponent); }
};
struct PowBackward {
  float exponent;
  __device__ float operator()(float x, float dy) const { return dy * exponent * power(x, exponent - 1.0f); }
};

struct GeluTanh {
  __device__ float operator()(float x) const { return x * gelu_gate(x); }
};
struct GeluTanhBackward {
  __device__ float operator()(float x, float dy) const {
    const float s = gelu_gate(x);
    return dy * (s + 2.0f * x * s * (1.0f - s) * GELU_SLOPE * (1.0f + 3.0f * GELU_CUBE * x * x));
  }
};

}  // namespace mbc

extern "C" {
const char* mbc_sqrt(const MbcCall& call) { return mbc::run_one(call, mbc::Sqrt{}); }
const char* mbc_sqrt_backward(const MbcCall& call) { return mbc::run_two(call, mbc::SqrtBackward{}); }
const char* mbc_abs(const MbcCall& call) { return mbc::run_one(call, mbc::Abs{}); }
const char* mbc_abs_backward(const MbcCall& call) { return mbc::run_two(call, mbc::AbsBackward{}); }
const char* mbc_exp(const MbcCall& call) { return mbc::run_one(call, mbc::Exp{}); }
const char* mbc_exp_backward(const MbcCall& call) { return mbc::run_two(call, mbc::ExpBackward{}); }
const char* mbc_log(const MbcCall& call) { return mbc::run_one(call, mbc::Log{}); }
const char* mbc_log_backward(const MbcCall& call) { return mbc::run_two(call, mbc::LogBackward{}); }
const char* mbc_pow(const MbcCall& call) { return mbc::run_one(call, mbc::Pow{mbc::real(call, 0)}); }
const char* mbc_pow_backward(const MbcCall& call) { return mbc::run_two(call, mbc::PowBackward{mbc::real(call, 0)}); }
const char* mbc_gelu_tanh(const MbcCall& call) { return mbc::run_one(call, mbc::GeluTanh{}); }
const char* mbc_gelu_tanh_backward(const MbcCall& call) { return mbc::run_two(call, mbc::GeluTanhBackward{}); }
}
