// A recording fake of cuBLASLt.
#include "fake.h"

#include <cublasLt.h>

#include <algorithm>
#include <map>

struct FakeLtHandle {};
struct FakeLtMatrix {
  int type;
  uint64_t height, width;
  int64_t step;
};
struct FakeLtProduct {
  int compute;
  int transposed[2] = {0, 0};
};
struct FakeLtPreference {
  uint64_t workspace_bytes = 0;
};

const char* cublasLtGetStatusString(cublasStatus_t status) { return status == CUBLAS_STATUS_SUCCESS ? "ok" : "no"; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new FakeLtHandle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* matrix, cudaDataType_t type, uint64_t height,
                                          uint64_t width, int64_t step) {
  *matrix = new FakeLtMatrix{type, height, width, step};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t matrix) {
  delete matrix;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* product, cublasComputeType_t compute, cudaDataType_t) {
  *product = new FakeLtProduct{compute};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t product) {
  delete product;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t name,
                                              const void* value, size_t) {
  product->transposed[name == CUBLASLT_MATMUL_DESC_TRANSA ? 0 : 1] = *static_cast<const int*>(value);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new FakeLtPreference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t name, const void* value,
                                                    size_t) {
  if (name == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
    preference->workspace_bytes = *static_cast<const uint64_t*>(value);
  return CUBLAS_STATUS_SUCCESS;
}
// Refuses products whose sizes do not fit together, as cuBLASLt does. Two algorithms without workspace, three with it.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int most, cublasLtMatmulHeuristicResult_t* results, int* count) {
  const bool ta = product->transposed[0] != 0, tb = product->transposed[1] != 0;
  const bool fits = (ta ? a->width : a->height) == d->height && (tb ? b->height : b->width) == d->width &&
                    (ta ? a->height : a->width) == (tb ? b->width : b->height);
  const int algorithms = fake_has_everything() ? most : preference->workspace_bytes > 0 ? 3 : 2;
  *count = fits ? std::min(algorithms, most) : 0;
  for (int i = 0; i < *count; ++i) {
    results[i] = {};
    results[i].algo.data[0] = static_cast<uint64_t>(i);
  }
  return fits ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t product, const void*, const void* a,
                              cublasLtMatrixLayout_t la, const void* b, cublasLtMatrixLayout_t lb, const void* beta,
                              const void*, cublasLtMatrixLayout_t, void* d, cublasLtMatrixLayout_t ld,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
  std::ostringstream& out = fake_launch("cublaslt", stream);
  fake_list(out, "offsets", std::initializer_list<int64_t>{fake_offset(a), fake_offset(b), fake_offset(d)});
  if (workspace != nullptr) out << " workspace=" << fake_offset(workspace);
  out << " workspace_bytes=" << workspace_bytes;
  fake_list(out, "a", std::initializer_list<uint64_t>{la->height, la->width});
  fake_list(out, "b", std::initializer_list<uint64_t>{lb->height, lb->width});
  fake_list(out, "d", std::initializer_list<uint64_t>{ld->height, ld->width});
  fake_list(out, "types", std::initializer_list<int>{la->type, lb->type, ld->type, product->compute});
  fake_list(out, "transposed", product->transposed);
  out << " beta=" << *static_cast<const float*>(beta) << " algorithm=" << algorithm->data[0];
  fake_end();
  return CUBLAS_STATUS_SUCCESS;
}
