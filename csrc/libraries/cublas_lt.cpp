#include "libraries/cublas_lt.h"

#include <cublasLt.h>

#include <array>
#include <cstdlib>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <string>

#include "libraries/loader.h"

namespace warpsmith::cublas_lt {
namespace {

constexpr uint64_t kMostWorkspaceBytes = uint64_t{32} << 20;  // what cuBLAS itself takes on Hopper
constexpr uint32_t kAlignmentBytes = 16;                      // of every matrix: another view then gives the same bits
constexpr size_t kMostPlans = 256;

// Each function by its name in the header.
#define WARPSMITH_FUNCTIONS(ROW)             \
  ROW(cublasLtGetVersion)                    \
  ROW(cublasLtMatmul)                        \
  ROW(cublasLtMatmulAlgoConfigGetAttribute)  \
  ROW(cublasLtMatmulAlgoGetHeuristic)        \
  ROW(cublasLtMatmulDescInit_internal)       \
  ROW(cublasLtMatmulDescSetAttribute)        \
  ROW(cublasLtMatmulPreferenceInit_internal) \
  ROW(cublasLtMatmulPreferenceSetAttribute)  \
  ROW(cublasLtMatrixLayoutInit_internal)

struct Table {
#define WARPSMITH_ROW(function) decltype(&::function) function;
  WARPSMITH_FUNCTIONS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
  const char* missing = nullptr;
};

const Table& table() {
  static const Table found = [] {
    const libraries::Loaded library({"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.14"});
    Table t;
#define WARPSMITH_ROW(function)                                                      \
  t.function = library.find<std::remove_pointer_t<decltype(t.function)>>(#function); \
  if (!t.function && !t.missing) t.missing = #function;
    WARPSMITH_FUNCTIONS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
    return t;
  }();
  return found;
}

Status error(const char* function, cublasStatus_t code) {
  return Status::device(std::string(function) + ": error " + std::to_string(static_cast<int>(code)));
}

#define WARPSMITH_CALL(function, ...)                                                             \
  do {                                                                                            \
    if (const cublasStatus_t code = table().function(__VA_ARGS__); code != CUBLAS_STATUS_SUCCESS) \
      return error(#function, code);                                                              \
  } while (false)

cudaDataType_t type_of(Dtype dtype) {
  return dtype == Dtype::float32 ? CUDA_R_32F : dtype == Dtype::float16 ? CUDA_R_16F : CUDA_R_16BF;
}
cudaDataType_t factor_type(const Product& p, bool e5m2) {
  return p.scales == Scales::none ? type_of(p.dtype) : e5m2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3;
}

cublasLtEpilogue_t epilogue_of(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::none: return CUBLASLT_EPILOGUE_DEFAULT;
    case Epilogue::bias: return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::gelu: return CUBLASLT_EPILOGUE_GELU;
    case Epilogue::gelu_bias: return CUBLASLT_EPILOGUE_GELU_BIAS;
    case Epilogue::gelu_aux: return CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::gelu_aux_bias: return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::dgelu: return CUBLASLT_EPILOGUE_DGELU;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

// The library counts columns first: it computes out^T [columns, rows] = b^T a^T. Its first operand is b, its second a.
struct Plan {
  cublasLtMatrixLayoutOpaque_t first, second, out;
  cublasLtMatmulAlgo_t algorithm;
  Choice choice;
};

// What a plan depends on. Not on addresses: their alignment is always taken for 16 bytes.
using Key = std::array<int64_t, 13>;

Key key_of(const Product& p) {
  return {p.device,
          p.rows,
          p.columns,
          p.inner,
          p.a.stride,
          p.a.transposed,
          p.b.stride,
          p.b.transposed,
          static_cast<int64_t>(p.dtype),
          static_cast<int64_t>(p.epilogue),
          static_cast<int64_t>(p.scales),
          p.a_e5m2 + 2 * p.b_e5m2 + 4 * p.fast,
          p.addend != nullptr};
}

// The most recently used plan is the first of the list.
class Plans {
 public:
  bool find(const Key& key, Plan* plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return false;
    plans_.splice(plans_.begin(), plans_, found->second);
    *plan = found->second->second;
    return true;
  }

  void add(const Key& key, const Plan& plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (by_key_.count(key)) return;  // of another thread
    plans_.emplace_front(key, plan);
    by_key_[key] = plans_.begin();
    if (plans_.size() <= kMostPlans) return;
    by_key_.erase(plans_.back().first);
    plans_.pop_back();
  }

  // The product is not to be chosen again.
  void refuse(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = by_key_.find(key); found != by_key_.end()) found->second->second.choice = {};
  }

 private:
  std::mutex mutex_;
  std::list<std::pair<Key, Plan>> plans_;
  std::map<Key, std::list<std::pair<Key, Plan>>::iterator> by_key_;
};

Plans& plans() {
  static Plans all;
  return all;
}

template <class Value> Status set(cublasLtMatmulDescOpaque_t* to, cublasLtMatmulDescAttributes_t what, Value value) {
  WARPSMITH_CALL(cublasLtMatmulDescSetAttribute, to, what, &value, sizeof value);
  return {};
}

// On the stack and not in the plan: it holds the addresses of bias and aux.
Status describe(const Product& p, cublasLtMatmulDescOpaque_t* to) {
  WARPSMITH_CALL(cublasLtMatmulDescInit_internal, to, sizeof *to, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const auto operation = [](const Matrix& m) { return m.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  WARPSMITH_RETURN_IF_FAILED(set(to, CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(operation(p.b))));
  WARPSMITH_RETURN_IF_FAILED(set(to, CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(operation(p.a))));
  WARPSMITH_RETURN_IF_FAILED(set(to, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(epilogue_of(p.epilogue))));
  if (p.bias) WARPSMITH_RETURN_IF_FAILED(set(to, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias));
  if (p.scales != Scales::none) {
    WARPSMITH_RETURN_IF_FAILED(set(to, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale));
    WARPSMITH_RETURN_IF_FAILED(set(to, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale));
    WARPSMITH_RETURN_IF_FAILED(set(to, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(p.fast)));
    if (p.bias)
      WARPSMITH_RETURN_IF_FAILED(set(to, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(type_of(p.dtype))));
  }
  if (p.scales == Scales::rows) {
    constexpr auto kRows = static_cast<int32_t>(CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
    WARPSMITH_RETURN_IF_FAILED(set(to, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, kRows));
    WARPSMITH_RETURN_IF_FAILED(set(to, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, kRows));
  }
  if (p.aux) {
    WARPSMITH_RETURN_IF_FAILED(set(to, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux));
    WARPSMITH_RETURN_IF_FAILED(set(to, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.columns));
  }
  return {};
}

// [rows, columns] as the library counts it: its columns are our rows.
Status lay_out(const Matrix& m, int64_t rows, int64_t columns, cudaDataType_t type, cublasLtMatrixLayoutOpaque_t* to) {
  const int64_t first = m.transposed ? rows : columns, second = m.transposed ? columns : rows;
  WARPSMITH_CALL(cublasLtMatrixLayoutInit_internal, to, sizeof *to, type, static_cast<uint64_t>(first),
                 static_cast<uint64_t>(second), m.stride);
  return {};
}

template <class Value>
Status prefer(cublasLtMatmulPreferenceOpaque_t* to, cublasLtMatmulPreferenceAttributes_t what, Value value) {
  WARPSMITH_CALL(cublasLtMatmulPreferenceSetAttribute, to, what, &value, sizeof value);
  return {};
}

int number_of(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t what) {
  int32_t value = 0;
  size_t written = 0;
  table().cublasLtMatmulAlgoConfigGetAttribute(&algorithm, what, &value, sizeof value, &written);
  return value;
}

Status make_plan(void* handle, const Product& p, Plan* plan) {
  cublasLtMatmulDescOpaque_t product;
  WARPSMITH_RETURN_IF_FAILED(describe(p, &product));
  WARPSMITH_RETURN_IF_FAILED(lay_out(p.b, p.inner, p.columns, factor_type(p, p.b_e5m2), &plan->first));
  WARPSMITH_RETURN_IF_FAILED(lay_out(p.a, p.rows, p.inner, factor_type(p, p.a_e5m2), &plan->second));
  WARPSMITH_RETURN_IF_FAILED(lay_out({p.out, p.columns, false}, p.rows, p.columns, type_of(p.dtype), &plan->out));

  cublasLtMatmulPreferenceOpaque_t preference;
  WARPSMITH_CALL(cublasLtMatmulPreferenceInit_internal, &preference, sizeof preference);
  WARPSMITH_RETURN_IF_FAILED(prefer(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMostWorkspaceBytes));
  // Never partial sums in the output's 16 bits: TransformerEngine #3440 met them.
  WARPSMITH_RETURN_IF_FAILED(
      prefer(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
             static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)));
  for (const auto matrix : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    WARPSMITH_RETURN_IF_FAILED(prefer(&preference, matrix, kAlignmentBytes));

  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  const cublasStatus_t code =
      table().cublasLtMatmulAlgoGetHeuristic(static_cast<cublasLtHandle_t>(handle), &product, &plan->first,
                                             &plan->second, &plan->out, &plan->out, &preference, 1, &best, &found);
  plan->choice = {};
  // A product for which the library has nothing is the caller's to compute in another way.
  if (code != CUBLAS_STATUS_SUCCESS || found == 0 || best.state != CUBLAS_STATUS_SUCCESS) return {};
  plan->algorithm = best.algo;
  plan->choice = {true,
                  number_of(best.algo, CUBLASLT_ALGO_CONFIG_ID),
                  number_of(best.algo, CUBLASLT_ALGO_CONFIG_TILE_ID),
                  number_of(best.algo, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                  number_of(best.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
                  static_cast<int64_t>(best.workspaceSize)};
  return {};
}

Status plan_of(void* handle, const Product& p, Plan* plan) {
  WARPSMITH_RETURN_IF_FAILED(available());
  const Key key = key_of(p);
  if (plans().find(key, plan)) return {};
  WARPSMITH_RETURN_IF_FAILED(make_plan(handle, p, plan));
  plans().add(key, *plan);
  return {};
}

}  // namespace

Status available() {
  static const char* const asked = std::getenv("WARPSMITH_CUBLAS_LT");
  if (asked && std::string(asked) == "0") return Status::unsupported("WARPSMITH_CUBLAS_LT=0 was asked for");
  if (!table().missing) return {};
  return Status::unsupported(std::string("expected a cuBLASLt 12 to 14 opened by torch, found none with ") +
                             table().missing);
}

int64_t version() { return table().missing ? 0 : static_cast<int64_t>(table().cublasLtGetVersion()); }

Status choose(void* handle, const Product& product, Choice* choice) {
  Plan plan;
  WARPSMITH_RETURN_IF_FAILED(plan_of(handle, product, &plan));
  *choice = plan.choice;
  return {};
}

Status multiply(void* handle, void* stream, const Product& p, void* workspace, int64_t workspace_bytes) {
  Plan plan;
  WARPSMITH_RETURN_IF_FAILED(plan_of(handle, p, &plan));
  if (!plan.choice.found || plan.choice.workspace_bytes > workspace_bytes)
    return Status::unsupported("cublasLtMatmul: expected a product that the library has chosen for, got another");
  cublasLtMatmulDescOpaque_t product;
  WARPSMITH_RETURN_IF_FAILED(describe(p, &product));
  const float alpha = 1, beta = p.addend ? 1 : 0;
  const cublasStatus_t code = table().cublasLtMatmul(
      static_cast<cublasLtHandle_t>(handle), &product, &alpha, p.b.data, &plan.first, p.a.data, &plan.second, &beta,
      p.addend ? p.addend : p.out, &plan.out, p.out, &plan.out, &plan.algorithm, workspace,
      static_cast<size_t>(workspace_bytes), static_cast<cudaStream_t>(stream));
  if (code == CUBLAS_STATUS_SUCCESS) return {};
  // The heuristic is not told of the addend.
  if (p.addend && (code == CUBLAS_STATUS_NOT_SUPPORTED || code == CUBLAS_STATUS_INVALID_VALUE)) {
    plans().refuse(key_of(p));
    return Status::unsupported("cublasLtMatmul: expected a product without an addend");
  }
  return error("cublasLtMatmul", code);
}

}  // namespace warpsmith::cublas_lt
