#pragma once
// The C++ functions of the norm family beyond rms_norm. Included by functions.cpp: one translation unit, because
// torch's headers take most of the time to compile.
#include <torch/library.h>
#include <warpsmith/norm.h>

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Pair = std::tuple<Tensor, Tensor>;

Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  return warpsmith::layer_norm(x, weight, bias, eps);
}

Pair add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight, std::optional<double> eps,
                  double weight_offset) {
  return warpsmith::add_rms_norm(x, residual, weight, eps, weight_offset);
}

Pair add_layer_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight, const OptionalTensor& bias,
                    double eps) {
  return warpsmith::add_layer_norm(x, residual, weight, bias, eps);
}

Pair dropout_add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double p,
                          std::optional<double> eps, bool training, double weight_offset, const OptionalTensor& seed) {
  return warpsmith::dropout_add_rms_norm(x, residual, weight, p, eps, training, weight_offset, seed);
}

Pair dropout_add_layer_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                            const OptionalTensor& bias, double p, double eps, bool training,
                            const OptionalTensor& seed) {
  return warpsmith::dropout_add_layer_norm(x, residual, weight, bias, p, eps, training, seed);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpsmith_cpp_api, m) {
  m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor", &layer_norm);
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float? eps, float weight_offset) -> (Tensor, Tensor)",
        &add_rms_norm);
  m.def("add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
        &add_layer_norm);
  m.def(
      "dropout_add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float p, float? eps, bool training, float "
      "weight_offset, Tensor? seed) -> (Tensor, Tensor)",
      &dropout_add_rms_norm);
  m.def(
      "dropout_add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float p, float eps, bool "
      "training, Tensor? seed) -> (Tensor, Tensor)",
      &dropout_add_layer_norm);
}
