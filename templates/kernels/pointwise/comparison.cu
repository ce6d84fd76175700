// Operators that compare or choose between two broadcast tensors of any rank (broadcast.cuh), in place or not.
//
// Bytes      the operands and the result once; a repeated operand is read from the cache.
// Threads    256 in a grid-stride loop over the result, 16 bytes at a time if possible.
// Limit      memory bandwidth.
#include "broadcast.cuh"

namespace mbc {

// NaN is passed on.
struct Maximum {
  __device__ float operator()(float a, float b) const { return a > b || a != a ? a : b; }
};
struct Minimum {
  __device__ float operator()(float a, float b) const { return a < b || a != a ? a : b; }
};
struct Fill {
  float value;
  __device__ float operator()(float a, float mask) const { return mask != 0.0f ? value : a; }
};
struct Keep {
  float value;
  __device__ float operator()(float a, float mask) const { return mask != 0.0f ? a : value; }
};
struct Equal {
  __device__ float operator()(float a, float b) const { return a == b ? 1.0f : 0.0f; }
};
struct Unequal {
  __device__ float operator()(float a, float b) const { return a != b ? 1.0f : 0.0f; }
};
struct Less {
  __device__ float operator()(float a, float b) const { return a < b ? 1.0f : 0.0f; }
};
struct LessOrEqual {
  __device__ float operator()(float a, float b) const { return a <= b ? 1.0f : 0.0f; }
};
// The share of a maximum's gradient that the first operand gets.
struct Share {
  __device__ float operator()(float a, float b) const { return a == b ? 0.5f : a < b ? 0.0f : 1.0f; }
};

}  // namespace mbc

extern "C" const char* mbc_select(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ArithmeticArguments>(call);
  const int64_t* more = behind<ArithmeticArguments>(call);
  const Strided<2> places(more);
  const float value = real(call, 0);
  MBC_FOR_TYPE(a.type, T, {
    switch (a.operation) {
      case 0: run_broadcast<T>(call, a.elements, places, Maximum{}); break;
      case 1: run_broadcast<T>(call, a.elements, places, Minimum{}); break;
      case 2: run_broadcast<T>(call, a.elements, places, Fill{value}); break;
      case 3: run_broadcast<T>(call, a.elements, places, Keep{value}); break;
      case 4: run_broadcast<T>(call, a.elements, places, Reversed<Fill>{{value}}); break;
      case 5: run_broadcast<T>(call, a.elements, places, Reversed<Keep>{{value}}); break;
      default: return "there is no such operator";
    }
  });
  return launched();
}

extern "C" const char* mbc_relation(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ArithmeticArguments>(call);
  const int64_t* more = behind<ArithmeticArguments>(call);
  const Strided<2> places(more);
  MBC_FOR_TYPE(a.type, T, {
    switch (a.operation) {
      case 0: run_broadcast<T>(call, a.elements, places, Equal{}); break;
      case 1: run_broadcast<T>(call, a.elements, places, Unequal{}); break;
      case 2: run_broadcast<T>(call, a.elements, places, Less{}); break;
      case 3: run_broadcast<T>(call, a.elements, places, LessOrEqual{}); break;
      case 4: run_broadcast<T>(call, a.elements, places, Reversed<Less>{}); break;
      case 5: run_broadcast<T>(call, a.elements, places, Reversed<LessOrEqual>{}); break;
      case 6: run_broadcast<T>(call, a.elements, places, Share{}); break;
      case 7: run_broadcast<T>(call, a.elements, places, Reversed<Share>{}); break;
      default: return "there is no such operator";
    }
  });
  return launched();
}
