#include "dtensor/dtensor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/error.h"
#include "comm/collectives.h"
#include "device_mesh/mesh_layout.h"
#include "dtensor/local/from_local_checks.h"
#include "dtensor/local/gather_full.h"
#include "dtensor/local/saved_spec.h"

namespace tessera {

namespace {

/// Returns whether `tensor`, of which the caller holds one reference, is the only user of its memory. Autograd passes
/// one gradient to both operands of an addition, and a leaf stores its gradient; two gradients must not share memory.
bool owns_memory(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.has_storage() && tensor.storage().use_count() == 1;
}

/// Returns a gradient that a leaf may store, which is written in place: row-major on every rank. An expanded one, such
/// as that of sum(), stores many elements in one place.
at::Tensor with_own_memory(const at::Tensor& grad) {
  if (!grad.is_contiguous()) {
    return grad.contiguous();
  }
  return owns_memory(grad) ? grad : grad.clone();
}

/// Returns the factor between the gradients of a term and of its tensor; nullopt if it depends on the other terms.
std::optional<double> gradient_of_term(const DTensorSpec& spec) {
  double scale = 1;
  for (size_t axis = 0; axis < spec.placements().size(); ++axis) {
    const auto& placement = spec.placements()[axis];
    if (!placement.is_partial() || placement.reduce_op() == ReduceOp::Sum) {
      continue;
    }
    if (placement.reduce_op() != ReduceOp::Avg) {
      return std::nullopt;
    }
    scale /= static_cast<double>(spec.mesh().shape()[axis]);
  }
  return scale;
}

class FromLocalFunction : public torch::autograd::Function<FromLocalFunction> {
 public:
  /// The local gradient is `scale` times that of the DTensor under `grad_placements`.
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& local, const SpecPtr& spec,
                            const Placements& grad_placements, std::optional<double> scale) {
    save_spec(context, spec->with_placements(grad_placements));
    context->saved_data["scale"] = scale;
    auto result = wrap_local(local.detach(), spec);
    if (!local.is_inference() && !result.is_inference()) {  // so that autograd detects writes to the other one
      result.unsafeGetTensorImpl()->set_version_counter(local.unsafeGetTensorImpl()->version_counter());
    }
    return result;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    if (!grads[0].defined()) {
      return {at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
    }
    const auto scale = context->saved_data["scale"].toOptional<double>();
    TESSERA_CHECK(
        NotImplementedError, scale,
        "from_local: a backward reaches a term of a pending maximum, minimum or product, whose gradient depends "
        "on the other ranks' terms; say in grad_placements what the local tensor is to get, or give "
        "local.detach()");
    const auto grad = redistribute(grads[0], saved_spec(context)->placements());
    const size_t references = grad.is_same(grads[0]) ? 2 : 1;  // held by this function
    const bool owned = grad.use_count() == references && has_own_local_memory(grad);
    const auto local = to_local(grad);
    const auto own = *scale != 1 ? local.mul(*scale) : owned ? local : local.clone();
    return {own, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class ToLocalFunction : public torch::autograd::Function<ToLocalFunction> {
 public:
  /// Returns a view, which autograd protects from writes because a custom function returns it, or a separate tensor.
  enum class Result { View, Own };

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& tensor,
                            const Placements& grad_placements, Result result) {
    const auto* meta = dtensor_meta(tensor);
    check_not_stale(*meta, "to_local");
    save_spec(context, meta->spec->with_placements(grad_placements));
    return result == Result::View ? at::alias(meta->local) : meta->local.detach();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    if (!grads[0].defined()) {
      return {at::Tensor(), at::Tensor(), at::Tensor()};
    }
    const auto spec = saved_spec(context);
    const auto& grad = grads[0];
    TESSERA_ASSERT(grad.sizes() == spec->local_sizes(), "a local gradient of sizes [{}] for a {}",
                   fmt::join(grad.sizes(), ", "), spec->to_string());
    const auto grad_meta = TensorMeta::contiguous(spec->sizes(), grad.scalar_type());
    return {from_local(with_own_memory(grad), spec->mesh(), spec->placements(),
                       {.shape = std::vector<int64_t>(grad_meta.sizes.begin(), grad_meta.sizes.end())}),
            at::Tensor(), at::Tensor()};
  }
};

bool records_gradient(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

/// Returns the axes of more than one rank that shard `dim`, outer ones first.
c10::SmallVector<size_t, 4> sharding_axes(int64_t dim, const Placements& placements, const DeviceMesh& mesh) {
  c10::SmallVector<size_t, 4> axes;
  for (const size_t axis : shard_order(placements)) {
    if (placements[axis].is_shard(dim) && mesh.shape()[axis] > 1) {
      axes.push_back(axis);
    }
  }
  return axes;
}

/// Returns whether both give every rank the same part of a tensor of `ndim` dims, whatever its sizes.
bool have_equal_sharding(const Placements& a, const Placements& b, int64_t ndim, const DeviceMesh& mesh) {
  for (int64_t dim = 0; dim < ndim; ++dim) {
    if (sharding_axes(dim, a, mesh) != sharding_axes(dim, b, mesh)) {
      return false;
    }
  }
  return true;
}

/// Checks that a local gradient has the local tensor's sizes. If the sharding differs, checks all ranks' sizes, because
/// another sharding may give equal sizes on some of them.
void check_grad_placements(const DTensorSpec& spec, const Placements& grads) {
  if (have_equal_sharding(spec.placements(), grads, spec.ndim(), spec.mesh())) {
    return;
  }
  const auto& mesh = spec.mesh();
  const auto layout = MeshLayout::row_major(mesh.shape());
  for (int64_t place = 0; place < mesh.size(); ++place) {
    const auto coordinate = layout.coordinate(place);
    const MeshPosition position{mesh.shape(), coordinate};
    const auto own = local_sizes(spec.sizes(), spec.placements(), position);
    const auto wanted = local_sizes(spec.sizes(), grads, position);
    TESSERA_CHECK(ValueError, own == wanted,
                  "to_local: grad_placements {} of a {}: where the mesh has the coordinate [{}], the local tensor and "
                  "its gradient have sizes [{}], but those placements have [{}]; pass ones that cut the same dims",
                  to_string(grads), spec.to_string(), fmt::join(coordinate, ", "), fmt::join(own, ", "),
                  fmt::join(wanted, ", "));
  }
}

at::Tensor local_tensor(const at::Tensor& tensor, std::optional<Placements> grad_placements,
                        ToLocalFunction::Result result) {
  const auto& spec = dtensor_spec(tensor);
  if (!grad_placements) {
    return ToLocalFunction::apply(tensor, gradient_placements(spec->placements()), result);
  }
  const auto grads =
      normalized(std::move(*grad_placements), spec->ndim(), spec->mesh().ndim(), "to_local(grad_placements)");
  if (records_gradient(tensor)) {
    check_grad_placements(*spec, grads);
  }
  return ToLocalFunction::apply(tensor, grads, result);
}

void check_device(const at::Tensor& tensor, const DeviceMesh& mesh, const char* where) {
  TESSERA_CHECK(ValueError, tensor.is_meta() || tensor.device().type() == mesh.device_type(),
                "{}: a tensor on {} for {}; move it to the mesh's device first", where, tensor.device().str(), mesh);
}

/// Returns the global sizes if every rank holds as much as this one.
std::vector<int64_t> even_shape(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements) {
  auto shape = local.sizes().vec();
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].is_shard()) {
      shape[static_cast<size_t>(placements[axis].dim())] *= mesh.shape()[axis];
    }
  }
  return shape;
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) {
  return dtensor_meta(tensor) != nullptr;
}

const Placements& placements(const at::Tensor& tensor) {
  return dtensor_spec(tensor)->placements();
}

const DeviceMesh& device_mesh(const at::Tensor& tensor) {
  return dtensor_spec(tensor)->mesh();
}

at::Tensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements,
                             DistributeOptions options) {
  TESSERA_CHECK(ValueError, tensor.defined() && !is_dtensor(tensor),
                "distribute_tensor: the tensor is {}; pass a plain tensor, or redistribute() a DTensor",
                tensor.defined() ? "a DTensor already" : "undefined");
  TESSERA_CHECK(ValueError, tensor.is_leaf(),
                "distribute_tensor: the tensor is the result of differentiable ops, and its history would be lost; "
                "detach() it, or use from_local, which is differentiable");
  check_device(tensor, mesh, "distribute_tensor");
  auto target = normalized(std::move(placements), tensor.dim(), mesh.ndim(), "distribute_tensor");
  for (const auto& placement : target) {
    TESSERA_CHECK(ValueError, !placement.is_partial(),
                  "distribute_tensor: {}; only Shard and Replicate cut or copy a tensor. Partial terms come from "
                  "from_local",
                  to_string(target));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  auto full = tensor.detach().clone(at::MemoryFormat::Contiguous);
  for (int64_t axis = 0; options.src_data_rank && axis < mesh.ndim(); ++axis) {
    TESSERA_CHECK(ValueError, *options.src_data_rank >= 0 && *options.src_data_rank < mesh.size(axis),
                  "distribute_tensor: src_data_rank {} on an axis of {} ranks; use 0, or none", *options.src_data_rank,
                  mesh.size(axis));
    if (!full.is_meta()) {
      broadcast(full, *options.src_data_rank, mesh.group(axis));
    }
  }
  const auto spec =
      DTensorSpec::make(mesh, std::move(target), TensorMeta::contiguous(full.sizes(), full.scalar_type()));
  auto result = wrap_local(local_shard_of(full, *spec), spec);
  result.set_requires_grad(tensor.requires_grad());
  return result;
}

at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                      FromLocalOptions options) {
  TESSERA_CHECK(ValueError, local.defined() && !is_dtensor(local), "from_local: the tensor is {}; pass a plain one",
                local.defined() ? "a DTensor already" : "undefined");
  check_device(local, mesh, "from_local");
  if (options.run_check) {
    check_kind_across_ranks(local, mesh, "from_local");  // before code that depends on the number of dims
  }
  auto target = normalized(std::move(placements), local.dim(), mesh.ndim(), "from_local");
  for (const auto& placement : target) {
    TESSERA_CHECK(
        ValueError, !placement.is_norm_partial(),
        "from_local: {}; only norms over sharded dims make NormPartial tensors. Use Shard, Replicate or Partial",
        to_string(target));
  }
  const auto shape = options.shape.value_or(even_shape(local, mesh, target));
  TESSERA_CHECK(ValueError, static_cast<int64_t>(shape.size()) == local.dim(),
                "from_local: shape [{}] for a local tensor of {} dims", fmt::join(shape, ", "), local.dim());
  TESSERA_CHECK(ValueError, !options.stride || options.stride->size() == shape.size(),
                "from_local: {} strides for {} dims; give one a dim", options.stride->size(), shape.size());
  auto meta = TensorMeta::contiguous(shape, local.scalar_type());
  if (options.stride) {
    meta.strides = DimVector(options.stride->begin(), options.stride->end());
  }
  const auto spec = DTensorSpec::make(mesh, target, std::move(meta));
  if (options.run_check) {
    check_sizes_across_ranks(local, shape, *spec, {.where = "from_local", .remedy = "Pass options.shape"});
    check_copies_across_ranks(local, *spec, "from_local");
  }
  TESSERA_CHECK(ValueError, local.sizes() == spec->local_sizes(),
                "from_local: this rank's local sizes are [{}], but {} has [{}] here; pass options.shape, the global "
                "sizes, and shards cut as torch.chunk cuts them",
                fmt::join(local.sizes(), ", "), spec->to_string(), fmt::join(spec->local_sizes(), ", "));
  const auto grad_placements = options.grad_placements ? normalized(*options.grad_placements, local.dim(), mesh.ndim(),
                                                                    "from_local(grad_placements)")
                                                       : gradient_placements(target);
  // Strides of local tensors may differ between ranks, at least in dims of size 1. Global strides may not, and local
  // tensors of one spec have the same layout, as kernels with several tensors assume.
  const auto laid_out = options.stride ? local : local.contiguous();
  const auto scale = options.grad_placements ? 1 : gradient_of_term(*spec);
  return FromLocalFunction::apply(laid_out.resolve_conj().resolve_neg(), spec, grad_placements, scale);
}

at::Tensor to_local(const at::Tensor& tensor, std::optional<Placements> grad_placements) {
  const bool view = records_gradient(tensor);
  return local_tensor(tensor, std::move(grad_placements),
                      view ? ToLocalFunction::Result::View : ToLocalFunction::Result::Own);
}

at::Tensor take_local(at::Tensor tensor, std::optional<Placements> grad_placements) {
  auto local = local_tensor(tensor, std::move(grad_placements), ToLocalFunction::Result::Own);
  if (records_gradient(tensor)) {  // so that autograd detects that the saved DTensor was written
    local.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
  }
  return local;
}

at::Tensor full_tensor(const at::Tensor& tensor, std::optional<Placements> grad_placements) {
  if (tensor.defined() && !is_dtensor(tensor)) {
    TESSERA_CHECK(ValueError, !grad_placements,
                  "full_tensor: grad_placements {} for {}, a plain tensor, whose gradient has none; leave them away",
                  to_string(*grad_placements), to_string(TensorMeta::of(tensor)));
    return tensor;
  }
  const Placements replicated(dtensor_spec(tensor)->placements().size(), Replicate());
  auto whole = redistribute(tensor, replicated);
  return whole.is_same(tensor) ? to_local(whole, std::move(grad_placements))
                               : take_local(std::move(whole), std::move(grad_placements));
}

}  // namespace tessera
