#include "bindings/support/library.h"
#include "bindings/support/linear.h"

// matmul_symmetric, and the products of optimizers that are known to be symmetric: half of the tiles by our Hopper
// kernels, else half of the panels by torch's products; what lies above the diagonal is copied below it.
extern "C" {
AOTITorchError aoti_torch_cpu_bmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2);
AOTITorchError aoti_torch_cpu_baddbmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle batch1,
                                          AtenTensorHandle batch2, double beta, double alpha);
#ifdef WARPSMITH_CUDA
// Absent in CPU builds of torch; reached only with a CUDA tensor in hand.
__attribute__((weak)) AOTITorchError aoti_torch_cuda_bmm_out(AtenTensorHandle out, AtenTensorHandle self,
                                                             AtenTensorHandle mat2);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_baddbmm_out(AtenTensorHandle out, AtenTensorHandle self,
                                                                 AtenTensorHandle batch1, AtenTensorHandle batch2,
                                                                 double beta, double alpha);
#endif
}

namespace warpsmith {
namespace {

// Matrices of one size and layout, so many elements apart.
struct Matrices {
  Tensor tensor;
  int64_t batches, rows, columns, apart, row_stride, column_stride;

  Tensor view(int64_t first_row, int64_t row_count, int64_t first_column, int64_t column_count) const {
    const int64_t sizes[3] = {batches, row_count, column_count}, strides[3] = {apart, row_stride, column_stride};
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
        tensor.get(), 3, sizes, strides, first_row * row_stride + first_column * column_stride, &handle));
    return Tensor(handle);
  }
  Matrices turned() const { return {tensor, batches, columns, rows, apart, column_stride, row_stride}; }
};

// The leading dimensions as one. A tensor whose matrices have neither rows nor columns adjacent, overlap, or have no
// one distance, is copied.
Matrices as_matrices(const char* op, const Tensor& t) {
  const int64_t dim = t.dim();
  const auto sizes = t.sizes(), strides = t.strides();
  Matrices m{t, 1, sizes[dim - 2], sizes[dim - 1], 0, strides[dim - 2], strides[dim - 1]};
  bool regular = true, first = true;
  int64_t next = 0;
  for (int64_t i = dim - 3; i >= 0; --i) {
    m.batches *= sizes[i];
    if (sizes[i] == 1) continue;
    if (first) m.apart = strides[i];
    regular = regular && (first || strides[i] == next);
    first = false;
    next = strides[i] * sizes[i];
  }
  if (m.rows <= 1) m.row_stride = std::max<int64_t>(m.columns, 1);
  if (m.columns <= 1 && m.rows > 1) m.column_stride = m.row_stride == 1 ? m.rows : 1;
  const auto fits = [](int64_t size, int64_t adjacent, int64_t others, int64_t apart) {
    return (size <= 1 || adjacent == 1) && (others <= 1 || apart >= std::max<int64_t>(size, 1));
  };
  if (regular && (m.batches <= 1 || m.apart > 0) &&
      (fits(m.columns, m.column_stride, m.rows, m.row_stride) ||
       fits(m.rows, m.row_stride, m.columns, m.column_stride))) {
    if (m.batches <= 1) m.apart = std::max<int64_t>(m.rows * m.columns, 1);
    return m;
  }
  const int64_t columns = std::max<int64_t>(m.columns, 1);
  return {as_contiguous(t, op), m.batches, m.rows, m.columns, std::max<int64_t>(m.rows, 1) * columns, columns, 1};
}

// out = alpha (a @ b) + beta z
void multiply_batches(const Tensor& out, const Tensor& a, const Tensor& b, const OptionalTensor& z, double alpha,
                      double beta) {
  const Tensor& c = z ? *z : out;
  const bool plain = !z && alpha == 1;
  if (!z) beta = 0;
#ifdef WARPSMITH_CUDA
  if (out.is_cuda()) {
    TORCH_ERROR_CODE_CHECK(plain ? aoti_torch_cuda_bmm_out(out.get(), a.get(), b.get())
                                 : aoti_torch_cuda_baddbmm_out(out.get(), c.get(), a.get(), b.get(), beta, alpha));
    return;
  }
#endif
  TORCH_ERROR_CODE_CHECK(plain ? aoti_torch_cpu_bmm_out(out.get(), a.get(), b.get())
                               : aoti_torch_cpu_baddbmm_out(out.get(), c.get(), a.get(), b.get(), beta, alpha));
}

// Panels of rows, of which each is multiplied from the diagonal on: four leave 10 of 16 parts of the work.
constexpr int64_t kPanels = 4, kLeastPanelled = 1024;

// out = alpha (x @ y^T) + beta z where that is symmetric, bit for bit. out [..., n, n] is contiguous.
void multiply_symmetric(const char* op, const Tensor& out_any, const Tensor& x_any, const Tensor& y_any,
                        const OptionalTensor& z_any, double alpha, double beta, Dtype dtype) {
  if (out_any.numel() == 0) return;
  const Matrices x = as_matrices(op, x_any), y = &y_any == &x_any ? x : as_matrices(op, y_any);
  const Matrices out = as_matrices(op, out_any);
  std::optional<Matrices> z;
  if (z_any) z = as_matrices(op, z_any->is_contiguous() ? *z_any : as_contiguous(*z_any, op));
  const int64_t n = x.rows;
#if defined(WARPSMITH_CUDA) || defined(WARPSMITH_SIM)
  const bool by_rows = x.column_stride == 1;
  if (may_be_own(out_any) && by_rows == (y.column_stride == 1)) {
    ProductParams p;
    p.layout = by_rows ? ProductLayout::nt : ProductLayout::tn;
    p.epilogue = ProductEpilogue::symmetric;
    p.dtype = dtype;
    p.a = x.tensor.const_data_ptr();
    p.b = y.tensor.const_data_ptr();
    p.a_stride = by_rows ? x.row_stride : x.column_stride;
    p.b_stride = by_rows ? y.row_stride : y.column_stride;
    p.a_apart = x.apart;
    p.b_apart = y.apart;
    p.out = out_any.mutable_data_ptr();
    if (z) p.z = const_cast<void*>(z->tensor.const_data_ptr()), p.z_stride = z->row_stride, p.z_apart = z->apart;
    p.rows = p.columns = n;
    p.inner = x.columns;
    p.batches = x.batches;
    p.alpha = static_cast<float>(alpha);
    p.beta = static_cast<float>(beta);
    if (run_own_product(op, out_any, p)) return;
  }
#endif
  const int64_t height = n < kLeastPanelled ? n : (n + kPanels - 1) / kPanels;
  const Matrices other = y.turned();
  for (int64_t first = 0; first < n; first += height) {
    const int64_t rows = std::min(height, n - first), rest = n - first;
    const auto part = [&](const Matrices& m) { return m.view(first, rows, first, rest); };
    multiply_batches(part(out), x.view(first, rows, 0, x.columns), other.view(0, x.columns, first, rest),
                     z ? OptionalTensor(part(*z)) : std::nullopt, alpha, beta);
  }
  const MirrorParams p{out_any.mutable_data_ptr(), out.batches, n, dtype};
  run_on<mirror_cuda, mirror_cpu>(op, out_any, p);
}

Tensor allocate_square(const char* op, const Tensor& x) {
  const auto sizes = x.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = shape[shape.size() - 2];
  return allocate(op, "the product", shape.data(), x.dim(), dtype_code(x), x);
}

Dtype check_matrices(const char* op, const Tensor& x) {
  const Dtype dtype = float_dtype(op, "x", x);
  if (x.dim() < 2) refuse(op, "x", "at least two dimensions", shape_text(x));
  return dtype;
}

Tensor matmul_symmetric(Tensor x) {
  const char* op = name(LinearOp::matmul_symmetric);
  const Dtype dtype = check_matrices(op, x);
  const OnDeviceOf device(x);
  const Tensor out = allocate_square(op, x);
  multiply_symmetric(op, out, x, x, std::nullopt, 1, 0, dtype);
  return out;
}

// alpha (x @ y^T) + beta z. The caller knows that x @ y^T is symmetric, and z is.
Tensor symmetric_product(Tensor x, Tensor y, OptionalTensor z, double alpha, double beta) {
  const char* op = "symmetric_product";
  const Dtype dtype = check_matrices(op, x);
  check_like(op, "y", y, x, dtype);
  check_finite(op, "alpha", alpha, dtype);
  check_finite(op, "beta", beta, dtype);
  const OnDeviceOf device(x);
  const Tensor out = allocate_square(op, x);
  if (z) {
    check_dtype(op, "z", *z, dtype);
    check_same_shape(op, "z", *z, out);
    check_same_device(op, "z", *z, x);
  }
  multiply_symmetric(op, out, x, y, z, alpha, beta, dtype);
  return out;
}

WARPSMITH_OPS(m) {
  m.add("matmul_symmetric(Tensor x) -> Tensor y", TORCH_BOX(&matmul_symmetric));
  m.add("symmetric_product(Tensor x, Tensor y, Tensor? z, float alpha, float beta) -> Tensor out",
        TORCH_BOX(&symmetric_product));
}

}  // namespace
}  // namespace warpsmith
