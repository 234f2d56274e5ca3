#include "dtensor/clip_grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_set>

#include "base/error.h"
#include "comm/context/flight_record.h"
#include "dtensor/dtensor.h"
#include "dtensor/kernel_norm.h"
#include "dtensor/shard_norms.h"

namespace tessera {

namespace {

/// Properties that the tensors of one op share.
struct SameMesh {
  DeviceMesh mesh;  // empty for plain tensors
  std::vector<at::Tensor> tensors;
};

/// Groups in order of their first tensors, which is equal on all ranks.
std::vector<SameMesh> by_mesh(const std::vector<at::Tensor>& tensors) {
  std::vector<SameMesh> groups;
  for (const auto& tensor : tensors) {
    const auto mesh = is_dtensor(tensor) ? device_mesh(tensor) : DeviceMesh();
    auto group = std::find_if(groups.begin(), groups.end(), [&](const SameMesh& other) { return other.mesh == mesh; });
    if (group == groups.end()) {
      group = groups.insert(groups.end(), {.mesh = mesh, .tensors = {}});
    }
    group->tensors.push_back(tensor);
  }
  return groups;
}

/// Throws unless all meshes have the same ranks. Each rank computes the norm over its own meshes; if these had
/// different ranks, ranks would get different norms, and scale parts of one gradient differently.
void check_same_ranks(const std::vector<SameMesh>& groups) {
  const SameMesh* first = nullptr;
  const auto sorted_ranks = [](const SameMesh& group) {
    auto ranks = group.mesh.root().ranks();
    std::ranges::sort(ranks);
    return ranks;
  };
  for (const auto& group : groups) {
    if (!group.mesh.defined()) {
      continue;
    }
    first = first ? first : &group;
    const auto own = sorted_ranks(group), others = sorted_ranks(*first);
    TESSERA_CHECK(ValueError, own == others,
                  "get_total_norm: gradients lie on {}, whose mesh is over the ranks [{}], and on {}, over [{}]: each "
                  "rank would get a norm of its own, and scale its shards by that. Clip those of each mesh by a call "
                  "of its own, or make both meshes parts of one",
                  first->mesh, fmt::join(others, ", "), group.mesh, fmt::join(own, ", "));
  }
}

at::ScalarType norm_dtype(const std::vector<at::Tensor>& tensors) {
  const bool has_double = std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return c10::toRealValueType(tensor.scalar_type()) == at::kDouble;
  });
  return has_double ? at::kDouble : at::kFloat;
}

bool have_norm_kernel(const SameMesh& group, double p) {
  return group.mesh.defined() && std::ranges::all_of(group.tensors, [&](const at::Tensor& tensor) {
           const auto& spec = dtensor_spec(tensor);
           return !spec->has_partial() && has_norm_kernel(tensor.device().type(), spec->dtype(), p);
         });
}

/// Returns tensors without dims whose combined p-norm is that of all elements.
std::vector<at::Tensor> group_norms(const SameMesh& group, double p, at::ScalarType dtype) {
  if (have_norm_kernel(group, p)) {
    return norms_of_shards(group.tensors, p, dtype, [p](at::TensorList locals) { return norm_by_kernel(locals, p); });
  }
  return at::_foreach_norm(group.tensors, p, dtype);
}

/// Returns absolute values of complex tensors, whose norms are real.
std::vector<at::Tensor> real_values(std::vector<at::Tensor> tensors) {
  for (auto& tensor : tensors) {
    tensor = tensor.is_complex() ? tensor.abs() : tensor;
  }
  return tensors;
}

/// Returns gradients, once per parameter: libtorch's parameters() lists shared ones under each name.
std::vector<at::Tensor> collect_gradients(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<c10::TensorImpl*> seen;
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second && parameter.grad().defined()) {
      gradients.push_back(parameter.grad());
    }
  }
  return gradients;
}

}  // namespace

at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, const ClipGradNormOptions& options) {
  const FlightLabel label("get_total_norm");
  TESSERA_CHECK(ValueError, options.norm_type > 0, "get_total_norm: norm_type is {}; it is above 0, or infinity",
                options.norm_type);
  const at::NoGradGuard no_grad;
  const auto dtype = norm_dtype(tensors);
  std::vector<at::Tensor> norms;
  const auto groups = by_mesh(real_values(tensors));
  check_same_ranks(groups);
  for (const auto& group : groups) {
    const auto each = group_norms(group, options.norm_type, dtype);
    const auto norm = at::linalg_vector_norm(at::stack(each), options.norm_type);
    norms.push_back(is_dtensor(norm) ? full_tensor(norm) : norm);
  }
  if (norms.empty()) {
    return at::zeros({});
  }
  auto total = norms.size() == 1 ? norms[0] : at::linalg_vector_norm(at::stack(norms), options.norm_type);
  TESSERA_CHECK(StateError, !options.error_if_nonfinite || total.isfinite().item<bool>(),
                "get_total_norm: the {}-norm of {} gradients is {}; skip the step, or pass error_if_nonfinite = false",
                options.norm_type, tensors.size(), total.item<double>());
  return total;
}

void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const at::Tensor& total_norm) {
  TESSERA_CHECK(ValueError, max_norm >= 0, "clip_grads_with_norm_: max_norm is {}; it is at least 0", max_norm);
  const at::NoGradGuard no_grad;
  const auto factor = (max_norm / (total_norm + 1e-6)).clamp_max(1.0);
  for (const auto& group : by_mesh(collect_gradients(parameters))) {
    at::_foreach_mul_(group.tensors, factor);
  }
}

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const ClipGradNormOptions& options) {
  auto total = get_total_norm(collect_gradients(parameters), options);
  clip_grads_with_norm_(parameters, max_norm, total);
  return total;
}

}  // namespace tessera
