#include "dtensor/dtensor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/error.h"
#include "comm/collectives.h"
#include "dtensor/saved_spec.h"

namespace tessera {

namespace {

class FromLocalFunction : public torch::autograd::Function<FromLocalFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& local, const SpecPtr& spec,
                            const Placements& grad_placements) {
    save_spec(context, spec->with_placements(grad_placements));
    return wrap_local(local.detach(), spec);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    if (!grads[0].defined()) {
      return {at::Tensor(), at::Tensor(), at::Tensor()};
    }
    return {to_local(redistribute(grads[0], saved_spec(context)->placements())), at::Tensor(), at::Tensor()};
  }
};

class ToLocalFunction : public torch::autograd::Function<ToLocalFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& tensor,
                            const Placements& grad_placements) {
    const auto* meta = dtensor_meta(tensor);
    save_spec(context, meta->spec->with_placements(grad_placements));
    return meta->local.detach();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    if (!grads[0].defined()) {
      return {at::Tensor(), at::Tensor()};
    }
    const auto spec = saved_spec(context);
    const auto& grad = grads[0];
    TESSERA_CHECK(ValueError, grad.sizes() == spec->local_sizes(),
                  "to_local: the local gradient has sizes [{}], but a {} has local sizes [{}]; pass grad_placements "
                  "that fit it",
                  fmt::join(grad.sizes(), ", "), spec->to_string(), fmt::join(spec->local_sizes(), ", "));
    const auto grad_meta = TensorMeta::contiguous(spec->sizes(), grad.scalar_type());
    return {from_local(grad, spec->mesh(), spec->placements(),
                       {.shape = std::vector<int64_t>(grad_meta.sizes.begin(), grad_meta.sizes.end())}),
            at::Tensor()};
  }
};

void check_device(const at::Tensor& tensor, const DeviceMesh& mesh, const char* where) {
  TESSERA_CHECK(ValueError, tensor.device().type() == mesh.device_type(),
                "{}: a tensor on {} for {}; move it to the mesh's device first", where, tensor.device().str(), mesh);
}

/// Global sizes if every rank holds as much as this one.
std::vector<int64_t> even_shape(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements) {
  auto shape = local.sizes().vec();
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].is_shard()) {
      shape[static_cast<size_t>(placements[axis].dim())] *= mesh.shape()[axis];
    }
  }
  return shape;
}

/// Global strides in the order of the local ones, so that a transposed local stays transposed.
DimVector strides_like(const at::Tensor& local, at::IntArrayRef shape) {
  std::vector<size_t> order(shape.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return local.strides()[a] > local.strides()[b]; });
  DimVector strides(shape.size());
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    stride *= std::max<int64_t>(shape[order[i]], 1);
  }
  return strides;
}

/// Whether all ranks of the mesh hold the same `values`, of which there are equally many on each.
bool same_on_all_ranks(std::vector<int64_t> values, const at::Tensor& local, const DeviceMesh& mesh) {
  const size_t count = values.size();
  for (size_t i = 0; i < count; ++i) {
    values.push_back(-values[i]);
  }
  auto extremes = at::tensor(values, at::TensorOptions().dtype(at::kLong)).to(local.device());
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    all_reduce(extremes, ReduceOp::Max, mesh.group(axis));
  }
  return extremes.narrow(0, 0, static_cast<int64_t>(count))
      .neg()
      .equal(extremes.narrow(0, static_cast<int64_t>(count), static_cast<int64_t>(count)));
}

/// Throws on every rank if the ranks disagree about the global tensor, or one holds other local sizes.
void check_sizes_across_ranks(const at::Tensor& local, const std::vector<int64_t>& shape, const DTensorSpec& spec) {
  const bool same_kind =
      same_on_all_ranks({local.dim(), static_cast<int64_t>(local.scalar_type())}, local, spec.mesh());
  TESSERA_CHECK(ValueError, same_kind,
                "from_local: the ranks pass tensors of different dtypes or numbers of dims; this rank a {}",
                to_string(TensorMeta::of(local)));
  TESSERA_CHECK(ValueError, same_on_all_ranks(shape, local, spec.mesh()),
                "from_local: the ranks make different global sizes of their local ones; this rank [{}] of [{}]. Pass "
                "options.shape, the global sizes, the same on every rank",
                fmt::join(shape, ", "), fmt::join(local.sizes(), ", "));
  TESSERA_CHECK(ValueError,
                same_on_all_ranks({local.sizes() == spec.local_sizes()}, local, spec.mesh()) &&
                    local.sizes() == spec.local_sizes(),
                "from_local: on some rank the local sizes do not fit {}; this rank has [{}] and needs [{}]. Pass "
                "options.shape, the global sizes, and shards cut as torch.chunk cuts them",
                spec.to_string(), fmt::join(local.sizes(), ", "), fmt::join(spec.local_sizes(), ", "));
}

/// Throws on every rank if a rank's copy differs from the first one's.
void check_copies_across_ranks(const at::Tensor& local, const DTensorSpec& spec) {
  for (int64_t axis = 0; axis < spec.mesh().ndim(); ++axis) {
    bool same = true;
    if (spec.placements()[static_cast<size_t>(axis)].is_replicate()) {
      const auto first = local.detach().clone(at::MemoryFormat::Contiguous);
      broadcast(first, 0, spec.mesh().group(axis));
      same = first.equal(local.detach());
    }
    TESSERA_CHECK(ValueError, same_on_all_ranks({same}, local, spec.mesh()) && same,
                  "from_local: placement Replicate() on axis {} of {}, but the ranks hold different values", axis,
                  spec.to_string());
  }
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) {
  return dtensor_meta(tensor) != nullptr;
}

const SpecPtr& dtensor_spec(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  TESSERA_CHECK(ValueError, meta != nullptr, "{} is not a DTensor; make one with distribute_tensor or from_local",
                tensor.defined() ? to_string(TensorMeta::of(tensor)) : "an undefined tensor");
  return meta->spec;
}

const Placements& placements(const at::Tensor& tensor) {
  return dtensor_spec(tensor)->placements();
}

const DeviceMesh& device_mesh(const at::Tensor& tensor) {
  return dtensor_spec(tensor)->mesh();
}

at::Tensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements) {
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
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    broadcast(full, 0, mesh.group(axis));
  }
  Placements replicated(target.size(), Replicate());
  const auto meta = TensorMeta::contiguous(full.sizes(), full.scalar_type());
  const auto whole = DTensorSpec::make(mesh, replicated, meta);
  auto result = wrap_local(redistribute_local(full, *whole, target), whole->with_placements(target));
  result.set_requires_grad(tensor.requires_grad());
  return result;
}

at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                      FromLocalOptions options) {
  TESSERA_CHECK(ValueError, local.defined() && !is_dtensor(local), "from_local: the tensor is {}; pass a plain one",
                local.defined() ? "a DTensor already" : "undefined");
  check_device(local, mesh, "from_local");
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
  TensorMeta meta{.sizes = DimVector(shape.begin(), shape.end()),
                  .strides = strides_like(local, shape),
                  .dtype = local.scalar_type()};
  const auto spec = DTensorSpec::make(mesh, target, std::move(meta));
  if (options.run_check) {
    check_sizes_across_ranks(local, shape, *spec);
    check_copies_across_ranks(local, *spec);
  }
  TESSERA_CHECK(ValueError, local.sizes() == spec->local_sizes(),
                "from_local: this rank's local sizes are [{}], but {} has [{}] here; pass options.shape, the global "
                "sizes, and shards cut as torch.chunk cuts them",
                fmt::join(local.sizes(), ", "), spec->to_string(), fmt::join(spec->local_sizes(), ", "));
  const auto grad_placements = options.grad_placements ? normalized(*options.grad_placements, local.dim(), mesh.ndim(),
                                                                    "from_local(grad_placements)")
                                                       : gradient_placements(target);
  return FromLocalFunction::apply(local, spec, grad_placements);
}

at::Tensor to_local(const at::Tensor& tensor, std::optional<Placements> grad_placements) {
  const auto& spec = dtensor_spec(tensor);
  const auto grads = grad_placements ? normalized(std::move(*grad_placements), spec->ndim(), spec->mesh().ndim(),
                                                  "to_local(grad_placements)")
                                     : gradient_placements(spec->placements());
  return ToLocalFunction::apply(tensor, grads);
}

at::Tensor full_tensor(const at::Tensor& tensor) {
  return to_local(redistribute(tensor, Placements(dtensor_spec(tensor)->placements().size(), Replicate())));
}

}  // namespace tessera
