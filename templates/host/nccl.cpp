// Collectives through NCCL. Python passes NCCL's functions and the communicator: nothing is linked, so that a package
// needs NCCL only if several GPUs train.
//
// Accesses of a launch, by kind:
//   gather         tensors of this rank, then the places of those of all ranks; one call gathers them
//   sum            the gradients of a bucket, then their sums in the same place; by copies also a workspace as long as
//                  the bucket
//   scatter        gradients, then this rank's parts of their sums
//   gather parts   alternately parts of new parameters and the old parameters, then the new parameters
//
// With thread blocks, a kernel of NCCL sums. Without them, copy engines move the data, which leaves all multiprocessors
// to concurrent kernels: each rank receives its part of the bucket from all ranks, sums it, and sends the sum to all.

#include "plan_tables.h"
#include "nccl_arguments.h"

extern "C" const char* mbc_sum_parts(const MbcCall& call);  // sum_parts.cu

namespace {

constexpr int FP32 = 7;         // ncclFloat32
constexpr int SUM = 0;          // ncclSum
constexpr int SUCCESS = 0;      // ncclSuccess
constexpr int IN_PROGRESS = 7;  // ncclInProgress

enum Does : int64_t { SUMS, GATHERS, SCATTERS, GATHERS_PARTS };

// A tensor and its parts, in elements: the part of rank r begins at r * part and ends a part later, or with the tensor.
struct Cut {
  int64_t whole;
  int64_t part;

  int64_t first(int64_t rank) const { return rank * part < whole ? rank * part : whole; }
  int64_t size(int64_t rank) const { return first(rank + 1) - first(rank); }
};

class Nccl final : public Library {
 public:
  explicit Nccl(const MbcRanks* ranks) : ranks_(ranks) {}

  int prepare(const int64_t* integers, int64_t, const int64_t*, int64_t) override {
    const auto& row = *reinterpret_cast<const CollectiveRow*>(integers);
    if (row.ctas == 0 && ranks_ != nullptr && (ranks_->all_to_all == nullptr || row.elements % ranks_->ranks != 0))
      throw Failure("the plan sums by copies, but NCCL is too old for it or there are too many ranks");
    return 0;
  }

  void run(int, const MbcCall& call) override {
    if (ranks_ == nullptr) throw Failure("the plan is for several GPUs, and no communicator was given");
    const auto& row = *reinterpret_cast<const CollectiveRow*>(call.integers);
    if (row.does == GATHERS) return gather(call, row);
    if (row.does == SCATTERS) return scatter(call, row);
    if (row.does == GATHERS_PARTS) return gather_parts(call, row);
    float* bucket = static_cast<float*>(call.pointers[0]);
    void* communicator = ranks_->communicator;
    if (row.ctas != 0) {
      settle(ranks_->all_reduce(bucket, bucket, static_cast<size_t>(row.elements), FP32, SUM, communicator,
                                call.stream));
      return;
    }
    float* parts = static_cast<float*>(call.pointers[call.pointer_count - 1]);
    const int64_t part = row.elements / ranks_->ranks;
    float* own = bucket + ranks_->rank * part;
    settle(ranks_->all_to_all(bucket, parts, static_cast<size_t>(part), FP32, communicator, call.stream));
    void* const pointers[] = {parts, own};
    const int64_t integers[] = {ranks_->ranks, part};
    const MbcCall sum{pointers, integers, nullptr, call.stream, 2, 2};
    if (const char* text = mbc_sum_parts(sum)) throw Failure(text);
    settle(ranks_->all_gather(own, bucket, static_cast<size_t>(part), FP32, communicator, call.stream));
  }

 private:
  // Gathers all operands in one kernel.
  void gather(const MbcCall& call, const CollectiveRow& row) const {
    const int64_t* words = call.integers + sizeof(CollectiveRow) / sizeof(int64_t);
    settle(ranks_->group_start());
    for (int64_t i = 0; i < row.operands; ++i)
      begun(ranks_->all_gather(call.pointers[i], call.pointers[row.operands + i], static_cast<size_t>(words[i]), FP32,
                               ranks_->communicator, call.stream));
    settle(ranks_->group_end());
  }

  static const Cut* cuts(const MbcCall& call) {
    return reinterpret_cast<const Cut*>(call.integers + sizeof(CollectiveRow) / sizeof(int64_t));
  }

  // Computes every sum in one kernel. A tensor that the ranks do not share evenly is reduced to each rank in turn,
  // which sends as many bytes. The padding of a part is zeroed, because the whole part is read as one tensor.
  void scatter(const MbcCall& call, const CollectiveRow& row) const {
    const Cut* all = cuts(call);
    for (int64_t i = 0; i < row.operands; ++i) {
      const int64_t own = all[i].size(ranks_->rank), padding = all[i].part - own;
      if (padding == 0) continue;
      float* part = static_cast<float*>(call.pointers[row.operands + i]);
      const auto bytes = static_cast<size_t>(padding) * sizeof(float);
      check(cudaMemsetAsync(part + own, 0, bytes, call.stream), "cudaMemsetAsync");
    }
    settle(ranks_->group_start());
    for (int64_t i = 0; i < row.operands; ++i) {
      const Cut& cut = all[i];
      const float* from = static_cast<const float*>(call.pointers[i]);
      void* to = call.pointers[row.operands + i];
      if (cut.whole == cut.part * ranks_->ranks) {
        begun(ranks_->reduce_scatter(from, to, static_cast<size_t>(cut.part), FP32, SUM, ranks_->communicator,
                                     call.stream));
        continue;
      }
      for (int64_t rank = 0; rank < ranks_->ranks; ++rank)
        if (cut.size(rank) != 0)
          begun(ranks_->reduce(from + cut.first(rank), to, static_cast<size_t>(cut.size(rank)), FP32, SUM,
                               static_cast<int>(rank), ranks_->communicator, call.stream));
    }
    settle(ranks_->group_end());
  }

  // Gathers every parameter in one kernel.
  void gather_parts(const MbcCall& call, const CollectiveRow& row) const {
    const Cut* all = cuts(call);
    settle(ranks_->group_start());
    for (int64_t i = 0; i < row.operands; ++i) {
      const Cut& cut = all[i];
      const void* from = call.pointers[2 * i];
      float* to = static_cast<float*>(call.pointers[2 * row.operands + i]);
      if (cut.whole == cut.part * ranks_->ranks) {
        begun(ranks_->all_gather(from, to, static_cast<size_t>(cut.part), FP32, ranks_->communicator, call.stream));
        continue;
      }
      for (int64_t rank = 0; rank < ranks_->ranks; ++rank)
        if (cut.size(rank) != 0)
          begun(ranks_->broadcast(from, to + cut.first(rank), static_cast<size_t>(cut.size(rank)), FP32,
                                  static_cast<int>(rank), ranks_->communicator, call.stream));
    }
    settle(ranks_->group_end());
  }

  // A call within a group, which completes at the group's end.
  void begun(int status) const {
    if (status != SUCCESS && status != IN_PROGRESS) settle(status);
  }

  // The communicator does not block: its thread may still be enqueueing, and a capture must not end before that.
  void settle(int status) const {
    while (status == IN_PROGRESS) {
      const int asked = ranks_->async_error(ranks_->communicator, &status);
      if (asked != SUCCESS) status = asked;
    }
    if (status != SUCCESS) throw Failure(std::string("NCCL: ") + ranks_->error_string(status));
  }

  const MbcRanks* ranks_;
};

}  // namespace

std::unique_ptr<Library> open_nccl(Shared& shared) { return std::make_unique<Nccl>(shared.ranks); }
