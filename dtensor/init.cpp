#include "dtensor/init.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/diag.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/randn.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "dtensor/random/random.h"
#include "dtensor/spec/dtensor_spec.h"

namespace tessera::init {

namespace {

void check(const at::Tensor& tensor, const char* where, int64_t least_dims, int64_t most_dims) {
  TESSERA_CHECK(ValueError, tensor.dim() >= least_dims && tensor.dim() <= most_dims,
                "init::{}: {}; a tensor of {} to {} dims is needed", where, to_string(TensorMeta::of(tensor)),
                least_dims, most_dims);
  const auto& now = placements(tensor);
  TESSERA_CHECK(ValueError, std::ranges::none_of(now, [](const Placement& p) { return p.is_partial(); }),
                "init::{}: {} waits for a reduction; redistribute() it to Shard or Replicate first", where,
                to_string(now));
}

/// Sets the parameter to its shard of `whole`, which is equal on every rank.
at::Tensor keep_part(at::Tensor tensor, const at::Tensor& whole) {
  const auto& mesh = device_mesh(tensor);
  const auto moved = whole.to(mesh.device_type(), tensor.scalar_type());
  tensor.copy_(distribute_tensor(moved, mesh, placements(tensor), {.src_data_rank = std::nullopt}));
  return tensor;
}

/// Applies `plain` of torch::nn::init, which draws nothing, to a plain tensor.
at::Tensor as_plain(at::Tensor tensor, at::Tensor (*plain)(at::Tensor), const char* where, int64_t least_dims,
                    int64_t most_dims) {
  if (!is_dtensor(tensor)) {
    return plain(std::move(tensor));
  }
  const at::NoGradGuard no_grad;
  check(tensor, where, least_dims, most_dims);
  return keep_part(tensor, plain(at::empty(tensor.sizes(), at::device(at::kCPU).dtype(tensor.scalar_type()))));
}

/// Returns an orthogonal matrix [rows, columns], drawn and transposed like libtorch's.
at::Tensor orthogonal_matrix(int64_t rows, int64_t columns) {
  const auto drawn = at::randn({rows, columns}, dtensor_generator(at::kCPU));
  const bool is_wide = rows < columns;
  const auto [q, r] = at::linalg_qr(is_wide ? drawn.t() : drawn);
  // Signs of r make q uniform (F. Mezzadri: How to generate random matrices from the classical compact groups, 2006).
  const auto uniform = q * at::diag(r).sign();
  return is_wide ? uniform.t() : uniform;
}

}  // namespace

at::Tensor orthogonal_(at::Tensor tensor, double gain) {
  if (!is_dtensor(tensor)) {
    return torch::nn::init::orthogonal_(std::move(tensor), gain);
  }
  const at::NoGradGuard no_grad;
  constexpr int64_t kAnyDims = 64;
  check(tensor, "orthogonal_", 2, kAnyDims);
  if (tensor.numel() == 0) {
    return tensor;
  }
  const auto rows = tensor.size(0);
  return keep_part(tensor, orthogonal_matrix(rows, tensor.numel() / rows).reshape(tensor.sizes())).mul_(gain);
}

at::Tensor eye_(at::Tensor tensor) {
  return as_plain(std::move(tensor), &torch::nn::init::eye_, "eye_", 2, 2);
}

at::Tensor dirac_(at::Tensor tensor) {
  return as_plain(std::move(tensor), &torch::nn::init::dirac_, "dirac_", 3, 5);
}

}  // namespace tessera::init
