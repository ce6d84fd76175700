// 1x1 convolutions to at most eight filters (a network's last layer), channels last, in every precision: forward, data
// gradient and filter gradient. They use FMA instead of tensor cores: with so few filters memory is the limit in any
// case.
//
// Bytes      forward: image in, result out. Data: gradient in, data gradient out. Filter: image and gradient in, a
//            partial filter gradient of each block out (split-K), which `add_parts` adds in order.
// Threads    256. Forward: four threads share a pixel, each takes every fourth 16 bytes of its channels; shuffles leave
//            each thread with one of four pixels. Data and filter: a thread keeps 16 bytes of channels and walks down
//            the pixels. A thread has four pixels in flight.
// Shared     forward: weights in fp32, [filters, channels]. Filter: one float of each thread for each of its channels.
// Registers  launch bounds: 4 blocks on a multiprocessor with up to two filters (3 in the filter pass), 2 with more.
// Limit      memory bandwidth.
#include "conv1x1_narrow.cuh"
#include "conv1x1_narrow_arguments.h"
#include "stem_conv_filter.cuh"

namespace mbc {

constexpr int MOST_FILTERS = 8;  // equal to the constant in mbc/kernels/cuda/conv/conv1x1_narrow.py

// Calls `run(a, count, f, first, second)` with arguments, the number of filters, sizes and the two inputs.
template <typename Run>
const char* for_inputs(const MbcCall& call, const Run& run) {
  const auto& a = arguments<Conv1x1NarrowArguments>(call);
  return for_type_and_filters<MOST_FILTERS>(call, a, [&](auto element, auto count, const Conv1x1Narrow& f) {
    run(a, count, f, in<decltype(element)>(call, 0), in<decltype(element)>(call, 1));
  });
}

}  // namespace mbc

extern "C" const char* mbc_conv1x1_narrow(const MbcCall& call) {
  using namespace mbc;
  return for_inputs(call, [&](const auto&, auto count, const Conv1x1Narrow& f, const auto* x, const auto* weight) {
    run_conv1x1_narrow<count>(call.stream, x, weight, call.pointers[2], f, NoNeighbours());
  });
}

extern "C" const char* mbc_conv1x1_narrow_backward_data(const MbcCall& call) {
  using namespace mbc;
  return for_inputs(call, [&](const auto&, auto count, const Conv1x1Narrow& f, const auto* dy, const auto* weight) {
    run_conv1x1_narrow_data<count>(call.stream, dy, weight, call.pointers[2], f, NoNeighbours());
  });
}

extern "C" const char* mbc_conv1x1_narrow_backward_filter(const MbcCall& call) {
  using namespace mbc;
  return for_inputs(call, [&](const auto& a, auto count, const Conv1x1Narrow& f, const auto* x, const auto* dy) {
    float* partial = out<float>(call, 3);
    sum_conv1x1_narrow<count>(call.stream, x, dy, partial, a.parts, f, NoNeighbours());
    FilterParts(f.channels, narrow(a.filters)).add(call, partial, a.parts, a.accumulate != 0);
  });
}
