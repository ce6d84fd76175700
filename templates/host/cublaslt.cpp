// GEMMs through cuBLASLt: one algorithm for each distinct row, taken once from the list that cuBLASLt's heuristics give
// within the planned workspace. All matrices are row-major: x [rows, inputs], w [outputs, inputs], y [rows, outputs].
// cuBLASLt is column-major, so that each matrix is its own transpose there. A linear layer is such a GEMM. So is a 1 x
// 1 convolution with channels last, where a row is a pixel.
//
// Accesses of a launch: forward x, w, y; data gradient dy, w, dx; filter gradient x, dy, dw; then a workspace, if any.

#include "plan_tables.h"

#include "mbc_types.h"
#include "cublaslt_arguments.h"

#include <cublasLt.h>

#include <map>
#include <vector>

namespace {

enum Pass : int64_t { FORWARD = 0, BACKWARD_DATA = 1, BACKWARD_FILTER = 2 };
enum Math : int64_t { STRICT = 0, TENSOR_CORES = 1 };

constexpr int64_t FULL_ALIGNMENT = 256;
constexpr int ALGORITHMS = 4;  // length of the requested list; a constant, so that the list is always equal

void check_cublas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Failure(std::string("cuBLASLt ") + what + ": " + cublasLtGetStatusString(status));
}

cudaDataType_t data_type_of(int64_t type) {
  if (type == MBC_BF16) return CUDA_R_16BF;
  return type == MBC_FP16 ? CUDA_R_16F : CUDA_R_32F;
}

uint32_t alignment_of(int64_t offset) {
  int64_t alignment = FULL_ALIGNMENT;
  while (offset % alignment != 0) alignment /= 2;
  return static_cast<uint32_t>(alignment);
}

// A matrix of `height` x `width` in cuBLASLt's order: columns are contiguous.
class Matrix {
 public:
  Matrix(cudaDataType_t type, int64_t height, int64_t width) {
    check_cublas(cublasLtMatrixLayoutCreate(&raw_, type, static_cast<uint64_t>(height), static_cast<uint64_t>(width),
                                            height),
                 "create layout");
  }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;
  ~Matrix() { cublasLtMatrixLayoutDestroy(raw_); }
  cublasLtMatrixLayout_t raw() const { return raw_; }

 private:
  cublasLtMatrixLayout_t raw_ = nullptr;
};

class Preference {
 public:
  Preference() { check_cublas(cublasLtMatmulPreferenceCreate(&raw_), "create preference"); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  ~Preference() { cublasLtMatmulPreferenceDestroy(raw_); }
  template <typename T>
  void set(cublasLtMatmulPreferenceAttributes_t name, T value) {
    check_cublas(cublasLtMatmulPreferenceSetAttribute(raw_, name, &value, sizeof value), "set preference");
  }
  cublasLtMatmulPreference_t raw() const { return raw_; }

 private:
  cublasLtMatmulPreference_t raw_ = nullptr;
};

// One prepared GEMM: d = a * b, added to d if the row accumulates.
class Product {
 public:
  Product(cublasLtHandle_t handle, const MatmulRow& row, const int64_t* offsets)
      : row_(row),
        type_(data_type_of(row.type)),
        result_type_(row.pass == BACKWARD_FILTER ? CUDA_R_32F : type_),
        a_(type_, row.inputs, row.pass == BACKWARD_FILTER ? row.rows : row.outputs),
        b_(type_, row.pass == FORWARD ? row.inputs : row.outputs, row.rows),
        d_(result_type_, row.pass == FORWARD ? row.outputs : row.inputs,
           row.pass == BACKWARD_FILTER ? row.outputs : row.rows) {
    const auto compute =
        row.type == MBC_FP32 && row.math == TENSOR_CORES ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    check_cublas(cublasLtMatmulDescCreate(&operation_, compute, CUDA_R_32F), "create product");
    try {
      transpose(CUBLASLT_MATMUL_DESC_TRANSA, row.pass == FORWARD);
      transpose(CUBLASLT_MATMUL_DESC_TRANSB, row.pass == BACKWARD_FILTER);
      choose(handle, offsets);
    } catch (...) {
      cublasLtMatmulDescDestroy(operation_);
      throw;
    }
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;
  ~Product() { cublasLtMatmulDescDestroy(operation_); }

  void run(cublasLtHandle_t handle, const MbcCall& call) const {
    const float alpha = 1.0f, beta = row_.accumulate != 0 ? 1.0f : 0.0f;
    void* const workspace = row_.workspace_bytes > 0 ? call.pointers[3] : nullptr;
    check_cublas(cublasLtMatmul(handle, operation_, &alpha, call.pointers[a_access()], a_.raw(),
                                call.pointers[b_access()], b_.raw(), &beta, call.pointers[2], d_.raw(),
                                call.pointers[2], d_.raw(), &algorithm_, workspace,
                                static_cast<size_t>(row_.workspace_bytes), call.stream),
                 "matmul");
  }

 private:
  int a_access() const { return row_.pass == BACKWARD_FILTER ? 0 : 1; }
  int b_access() const { return row_.pass == BACKWARD_FILTER ? 1 : 0; }

  void transpose(cublasLtMatmulDescAttributes_t name, bool on) {
    const cublasOperation_t value = on ? CUBLAS_OP_T : CUBLAS_OP_N;
    check_cublas(cublasLtMatmulDescSetAttribute(operation_, name, &value, sizeof value), "set transpose");
  }

  void choose(cublasLtHandle_t handle, const int64_t* offsets) {
    Preference preference;
    preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(row_.workspace_bytes));
    // Partial sums are added in fp32 and in a fixed order: results lose no bits and are equal in every run.
    preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                   static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(offsets[a_access()]));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(offsets[b_access()]));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(offsets[2]));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(offsets[2]));
    cublasLtMatmulHeuristicResult_t results[ALGORITHMS] = {};
    int count = 0;
    check_cublas(cublasLtMatmulAlgoGetHeuristic(handle, operation_, a_.raw(), b_.raw(), d_.raw(), d_.raw(),
                                                preference.raw(), ALGORITHMS, results, &count),
                 "heuristic");
    if (row_.algorithm >= count || results[row_.algorithm].state != CUBLAS_STATUS_SUCCESS)
      throw Failure("cuBLASLt has " + std::to_string(count) + " algorithms for this product within " +
                    std::to_string(row_.workspace_bytes) + " bytes of workspace, the plan needs number " +
                    std::to_string(row_.algorithm) + " counted from 0: compile the source again with this cuBLASLt");
    algorithm_ = results[row_.algorithm].algo;
  }

  MatmulRow row_;
  cudaDataType_t type_;
  cudaDataType_t result_type_;
  Matrix a_, b_, d_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
};

class CublasLt : public Library {
 public:
  CublasLt() { check_cublas(cublasLtCreate(&handle_), "create handle"); }
  ~CublasLt() override {
    products_.clear();
    cublasLtDestroy(handle_);
  }

  int prepare(const int64_t* integers, int64_t integer_count, const int64_t* offsets, int64_t) override {
    std::vector<int64_t> key(integers, integers + integer_count);
    for (int i = 0; i < 3; ++i) key.push_back(alignment_of(offsets[i]));
    const auto entry = numbers_.find(key);
    if (entry != numbers_.end()) return entry->second;
    products_.push_back(std::make_unique<Product>(handle_, *reinterpret_cast<const MatmulRow*>(integers), offsets));
    const int number = static_cast<int>(products_.size()) - 1;
    numbers_.emplace(std::move(key), number);
    return number;
  }

  void run(int number, const MbcCall& call) override { products_[static_cast<size_t>(number)]->run(handle_, call); }

 private:
  cublasLtHandle_t handle_ = nullptr;
  std::vector<std::unique_ptr<Product>> products_;
  std::map<std::vector<int64_t>, int> numbers_;
};

}  // namespace

std::unique_ptr<Library> open_cublaslt(Shared&) { return std::make_unique<CublasLt>(); }
