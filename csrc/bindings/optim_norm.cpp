#include <cmath>
#include <tuple>

#include "bindings/support/device.h"
#include "bindings/support/library.h"
#include "bindings/support/tensor.h"
#include "bindings/support/tensor_list.h"
#include "kernels/optim/grad_norm.h"

namespace warpsmith {
namespace {

constexpr const char* kNorm = "grad_norm";
constexpr const char* kPartials = "grad_norm_partials";
constexpr const char* kFinish = "grad_norm_finish";
constexpr const char* kChunk = "grad_norm_chunk_elems";
constexpr const char* kClip = "clip_grads";
constexpr const char* kCheck = "grad_check";
constexpr const char* kTable = "grad_table";
constexpr const char* kCheckTable = "grad_check_table";
constexpr const char* kUnscale = "unscale_grads";

NormOrder order_of(const char* op, double p) {
  if (p == 1) return NormOrder::one;
  if (p == 2) return NormOrder::two;
  if (p == HUGE_VAL) return NormOrder::infinity;
  refuse(op, "p", "1, 2 or inf", std::to_string(p));
}

// The table of the tensors, on their device, and where its chunks begin.
struct NormTable {
  Tensor words;
  int64_t record_words, chunk_count;

  const NormTensor* tensors() const { return static_cast<const NormTensor*>(words.const_data_ptr()); }
  const ListChunk* chunks() const {
    return reinterpret_cast<const ListChunk*>(static_cast<const int64_t*>(words.const_data_ptr()) + record_words);
  }
};

int64_t chunk_elems_of(const char* op, const Tensor& like, int64_t total_elems) {
  int32_t chunk_elems = 0;
  run_on(
      op, like, [&](void*) { return norm_chunk_elems_cuda(total_elems, &chunk_elems); },
      [&](const Parallel&) {
        chunk_elems = norm_chunk_elems_cpu();
        return Status();
      });
  return chunk_elems;
}

// chunks_of: elements for which a chunk's length is chosen; 0 for those of the tensors.
template <class Data> NormTable table_of(const char* op, const Tensors& tensors, Data&& data, int64_t chunks_of = 0) {
  if (tensors.empty()) refuse(op, "tensors", "at least one tensor", "none");
  std::vector<NormTensor> records;
  int64_t total = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    const std::string argument = item("tensors", i);
    const Dtype dtype = float_dtype(op, argument.c_str(), t);
    check_same_device(op, argument.c_str(), t, tensors[0]);
    if (!is_dense(t)) refuse(op, argument.c_str(), "elements without gaps or overlap", "other strides");
    records.push_back({data(t), t.numel(), 0, 0, dtype});
    total += t.numel();
  }
  const int64_t chunk_elems = chunk_elems_of(op, tensors[0], chunks_of > 0 ? chunks_of : total);
  const std::vector<int64_t> words = tensor_list_words(records, static_cast<int32_t>(chunk_elems));
  NormTable table;
  table.words = allocate_words(op, "table", static_cast<int64_t>(words.size()), tensors[0]);
  table.record_words = static_cast<int64_t>(records.size() * sizeof(NormTensor) / sizeof(int64_t));
  table.chunk_count = static_cast<int64_t>(words.size()) - table.record_words;
  write_words(op, words.data(), table.words);
  return table;
}

bool any_double(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const Tensor& t) { return t.scalar_type() == ScalarType::Double; });
}

Tensor scalar(const char* op, const char* what, bool is_double, const Tensor& like) {
  return allocate(op, what, nullptr, 0, is_double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32(), like);
}

// A scalar each, which `params` then points to.
std::tuple<Tensor, Tensor> allocate_results(const char* op, bool wide, const Tensor& like, GradNormParams& params) {
  const Tensor norm = scalar(op, "norm", wide, like), power_sum = scalar(op, "power sum", true, like);
  params.power_sum = static_cast<double*>(power_sum.mutable_data_ptr());
  params.norm = norm.mutable_data_ptr();
  params.norm_dtype = wide ? Dtype::float64 : Dtype::float32;
  return {norm, power_sum};
}

// The partial sums of a table, not yet written, to which `params` then points as to the table.
Tensor allocate_partials(const char* op, const NormTable& table, const Tensor& like, GradNormParams& params) {
  const Tensor partials = allocate_vector(op, "partial sums", table.chunk_count, aoti_torch_dtype_float64(), like);
  params.tensors = table.tensors();
  params.chunks = table.chunks();
  params.chunk_count = table.chunk_count;
  params.partials = static_cast<double*>(partials.mutable_data_ptr());
  return partials;
}

void* address_to_read(const Tensor& t) { return const_cast<void*>(t.const_data_ptr()); }

// The table of a norm, and what it writes, to which `params` points.
struct Norm {
  NormTable table;
  Tensor norm, power_sum, partials;
  GradNormParams params;
};

Norm norm_of(const char* op, NormTable table, double p, bool wide) {
  Norm n{};
  n.params.order = order_of(op, p);
  n.table = std::move(table);
  std::tie(n.norm, n.power_sum) = allocate_results(op, wide, n.table.words, n.params);
  n.partials = allocate_partials(op, n.table, n.table.words, n.params);
  return n;
}

Norm norm_of(const char* op, const Tensors& tensors, double p, int64_t chunks_of = 0) {
  order_of(op, p);  // refused before the table is made
  return norm_of(op, table_of(op, tensors, address_to_read, chunks_of), p, any_double(tensors));
}

std::tuple<Tensor, Tensor> grad_norm(Tensors tensors, double p) {
  const Norm n = norm_of(kNorm, tensors, p);
  run_on<grad_norm_cuda, grad_norm_cpu>(kNorm, tensors[0], n.params);
  return {n.norm, n.power_sum};
}

int64_t grad_norm_chunk_elems(Tensor like, int64_t total_elems) { return chunk_elems_of(kChunk, like, total_elems); }

// One float32 element on the device of the tensors.
float* float_of(const char* op, const char* argument, const Tensor& t, const Tensor& like) {
  check_dtype(op, argument, t, Dtype::float32);
  check_same_device(op, argument, t, like);
  if (t.numel() != 1) refuse(op, argument, "one element", shape_text(t));
  return static_cast<float*>(t.mutable_data_ptr());
}

// The known sums of a table's chunks.
const double* known_of(const char* op, const std::optional<Tensor>& known, const NormTable& table, const Tensor& like) {
  if (!known) return nullptr;
  check_float64(op, "known", *known);
  check_same_device(op, "known", *known, like);
  check_shape(op, "known", *known, {table.chunk_count});
  if (known->numel() > 1 && known->stride(0) != 1) refuse(op, "known", "adjacent elements", "other strides");
  return static_cast<const double*>(known->const_data_ptr());
}

Tensor grad_norm_partials(Tensors tensors, double p, int64_t total_elems, std::optional<Tensor> scale,
                          std::optional<Tensor> known) {
  GradNormParams params{};
  params.order = order_of(kPartials, p);
  if (total_elems < 0) refuse(kPartials, "total_elems", "a number >= 0", std::to_string(total_elems));
  const NormTable table = table_of(kPartials, tensors, address_to_read, total_elems);
  params.norm_dtype = any_double(tensors) ? Dtype::float64 : Dtype::float32;
  if (scale) params.scale = float_of(kPartials, "scale", *scale, tensors[0]);
  params.known = known_of(kPartials, known, table, tensors[0]);
  const Tensor partials = allocate_partials(kPartials, table, tensors[0], params);
  run_on<grad_norm_partials_cuda, grad_norm_partials_cpu>(kPartials, tensors[0], params);
  return partials;
}

std::tuple<Tensor, Tensor> grad_norm_finish(Tensor partials, double p, bool wide) {
  GradNormParams params{};
  params.order = order_of(kFinish, p);
  check_float64(kFinish, "partials", partials);
  if (partials.dim() != 1 || (partials.numel() > 1 && partials.stride(0) != 1))
    refuse(kFinish, "partials", "one dimension of adjacent elements", shape_text(partials));
  const auto results = allocate_results(kFinish, wide, partials, params);
  params.chunk_count = partials.numel();
  params.partials = static_cast<double*>(partials.mutable_data_ptr());
  run_on(
      kFinish, partials, [&](void* stream) { return grad_norm_finish_cuda(params, stream); },
      [&](const Parallel&) { return grad_norm_finish_cpu(params); });
  return results;
}

int64_t* counts_of(const char* op, const Tensor& t, int64_t tensors, const Tensor& like) {
  constexpr const char* kArgument = "bad_counts";
  if (t.scalar_type() != ScalarType::Long) refuse(op, kArgument, "int64", dtype_text(t.scalar_type()));
  check_shape(op, kArgument, t, {tensors});
  if (t.numel() > 1 && t.stride(0) != 1) refuse(op, kArgument, "adjacent elements", "other strides");
  check_same_device(op, kArgument, t, like);
  return static_cast<int64_t*>(t.mutable_data_ptr());
}

int64_t* counts_of(const char* op, const Tensor& t, const Tensors& tensors) {
  return counts_of(op, t, static_cast<int64_t>(tensors.size()), tensors[0]);
}

void check_max_norm(const char* op, double max_norm) {
  if (!(max_norm >= 0)) refuse(op, "max_norm", "a number >= 0", std::to_string(max_norm));
}

// The check of a norm's table of `tensors` records.
std::tuple<Tensor, Tensor, Tensor> check_of(const char* op, Norm n, int64_t tensors, const Tensor& scale,
                                            double max_norm, const Tensor& found_inf, const Tensor& bad_counts) {
  const Tensor& like = n.table.words;
  n.params.scale = float_of(op, "scale", scale, like);
  const Tensor grad_scale = scalar(op, "grad_scale", false, like);
  GradCheckParams params{n.params,
                         n.params.scale,
                         max_norm,
                         static_cast<float*>(grad_scale.mutable_data_ptr()),
                         float_of(op, "found_inf", found_inf, like),
                         counts_of(op, bad_counts, tensors, like),
                         tensors};
  run_on<grad_check_cuda, grad_check_cpu>(op, like, params);
  return {n.norm, n.power_sum, grad_scale};
}

std::tuple<Tensor, Tensor, Tensor> grad_check(Tensors tensors, double p, Tensor scale, double max_norm,
                                              Tensor found_inf, Tensor bad_counts, int64_t total_elems,
                                              std::optional<Tensor> known) {
  check_max_norm(kCheck, max_norm);
  if (total_elems < 0) refuse(kCheck, "total_elems", "a number >= 0", std::to_string(total_elems));
  Norm n = norm_of(kCheck, tensors, p, total_elems);
  n.params.known = known_of(kCheck, known, n.table, tensors[0]);
  return check_of(kCheck, std::move(n), static_cast<int64_t>(tensors.size()), scale, max_norm, found_inf, bad_counts);
}

Tensor grad_table(Tensors tensors) { return table_of(kTable, tensors, address_to_read).words; }

// tensors: of the table. wide: one of them is float64. Their memory must be that of the table.
std::tuple<Tensor, Tensor, Tensor> grad_check_table(Tensor table, int64_t tensors, bool wide, double p, Tensor scale,
                                                    double max_norm, Tensor found_inf, Tensor bad_counts) {
  check_max_norm(kCheckTable, max_norm);
  constexpr int64_t kWords = sizeof(NormTensor) / sizeof(int64_t);
  if (table.scalar_type() != ScalarType::Long || table.dim() != 1 || !table.is_contiguous())
    refuse(kCheckTable, "table", "what grad_table returned", "another tensor");
  if (tensors < 1 || table.numel() < tensors * kWords)
    refuse(kCheckTable, "tensors", "their number in the table", std::to_string(tensors));
  NormTable known{table, tensors * kWords, table.numel() - tensors * kWords};
  return check_of(kCheckTable, norm_of(kCheckTable, std::move(known), p, wide), tensors, scale, max_norm, found_inf,
                  bad_counts);
}

void unscale_grads(Tensors tensors, Tensor inv_scale, Tensor found_inf, Tensor bad_counts) {
  if (tensors.empty()) refuse(kUnscale, "tensors", "at least one tensor", "none");
  UnscaleParams params{};
  params.inv_scale = float_of(kUnscale, "inv_scale", inv_scale, tensors[0]);
  params.found_inf = float_of(kUnscale, "found_inf", found_inf, tensors[0]);
  params.bad_counts = counts_of(kUnscale, bad_counts, tensors);
  const NormTable table = table_of(kUnscale, tensors, [](const Tensor& t) { return t.mutable_data_ptr(); });
  params.tensors = table.tensors();
  params.chunks = table.chunks();
  params.chunk_count = table.chunk_count;
  run_on<unscale_grads_cuda, unscale_grads_cpu>(kUnscale, tensors[0], params);
}

void clip_grads(Tensors tensors, Tensor norm, double max_norm) {
  if (!(max_norm >= 0)) refuse(kClip, "max_norm", "a number >= 0", std::to_string(max_norm));
  const NormTable table = table_of(kClip, tensors, [](const Tensor& t) { return t.mutable_data_ptr(); });
  ClipParams params{};
  params.norm_dtype = float_dtype(kClip, "norm", norm);
  if (size_bytes(params.norm_dtype) == 2) refuse(kClip, "norm", "float32 or float64", name(params.norm_dtype));
  check_same_device(kClip, "norm", norm, tensors[0]);
  if (norm.numel() != 1) refuse(kClip, "norm", "one element", shape_text(norm));
  params.tensors = table.tensors();
  params.chunks = table.chunks();
  params.chunk_count = table.chunk_count;
  params.norm = norm.const_data_ptr();
  params.max_norm = max_norm;
  run_on<clip_grads_cuda, clip_grads_cpu>(kClip, tensors[0], params);
}

WARPSMITH_OPS(m) {
  m.add("grad_norm(Tensor[] tensors, float p) -> (Tensor norm, Tensor power_sum)", TORCH_BOX(&grad_norm));
  // The halves of grad_norm, for tensors on several ranks, and the elements of a chunk there. total_elems: of the
  // tensors of all ranks. Equal bits to grad_norm's, where the partials are joined in the order of its chunks.
  m.add("grad_norm_chunk_elems(Tensor like, int total_elems) -> int", TORCH_BOX(&grad_norm_chunk_elems));
  // known: what grad_norm_partials gave for the same tensors without a scale. Chunks whose sum was finite are not read.
  m.add(
      "grad_norm_partials(Tensor[] tensors, float p, int total_elems, Tensor? scale=None, Tensor? known=None)"
      " -> Tensor",
      TORCH_BOX(&grad_norm_partials));
  m.add("grad_norm_finish(Tensor partials, float p, bool wide) -> (Tensor norm, Tensor power_sum)",
        TORCH_BOX(&grad_norm_finish));
  m.add("clip_grads(Tensor(a!)[] tensors, Tensor norm, float max_norm) -> ()", TORCH_BOX(&clip_grads));
  m.add(
      "grad_check(Tensor[] tensors, float p, Tensor scale, float max_norm, Tensor(a!) found_inf, Tensor(b!) bad_counts,"
      " int total_elems=0, Tensor? known=None) -> (Tensor norm, Tensor power_sum, Tensor grad_scale)",
      TORCH_BOX(&grad_check));
  // The same for gradients that stay where they are: their table, then checks of it.
  m.add("grad_table(Tensor[] tensors) -> Tensor", TORCH_BOX(&grad_table));
  m.add(
      "grad_check_table(Tensor table, int tensors, bool wide, float p, Tensor scale, float max_norm,"
      " Tensor(a!) found_inf, Tensor(b!) bad_counts) -> (Tensor norm, Tensor power_sum, Tensor grad_scale)",
      TORCH_BOX(&grad_check_table));
  m.add("unscale_grads(Tensor(a!)[] tensors, Tensor inv_scale, Tensor(b!) found_inf, Tensor(c!) bad_counts) -> ()",
        TORCH_BOX(&unscale_grads));
}

}  // namespace
}  // namespace warpsmith
