#include "dtensor/local/redistribute.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "base/error.h"
#include "dtensor/local/redistribute_step.h"
#include "dtensor/local/saved_spec.h"

namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Range for libtorch's profiler; without one, it costs a branch.
class RedistributeRange {
 public:
  RedistributeRange(const char* part, const Placements& from, const Placements& to)
      : range_(at::RecordScope::USER_SCOPE) {
    if (range_.isActive()) [[unlikely]] {
      range_.before(fmt::format("{} {} to {}", part, to_string(from), to_string(to)));
    }
  }

 private:
  at::RecordFunction range_;
};

/// Makes a tensor contiguous, including dims of size 1, whose strides contiguous() ignores, because some kernels choose
/// their result's layout by them (_embedding_bag).
at::Tensor with_canonical_strides(const at::Tensor& tensor) {
  auto result = tensor.contiguous();
  const auto strides = c10::contiguous_strides(result.sizes());
  return result.strides() == strides ? result : result.as_strided(result.sizes(), strides);
}

void check_reductions(const DTensorSpec& from) {
  for (const auto& placement : from.placements()) {
    TESSERA_CHECK(
        NotImplementedError,
        !placement.is_partial(ReduceOp::Avg) || c10::isFloatingType(from.dtype()) || c10::isComplexType(from.dtype()),
        "redistribute: {}: an average of integers is not an integer; convert to a floating dtype first",
        from.to_string());
  }
}

void check_dtypes(const RedistributeOptions& options) {
  for (const auto& dtype : {options.forward_dtype, options.backward_dtype}) {
    TESSERA_CHECK(ValueError, !dtype || c10::isFloatingType(*dtype),
                  "redistribute: dtype {}; forward_dtype and backward_dtype are floating dtypes",
                  c10::toString(dtype.value_or(at::kFloat)));
  }
}

/// Returns the dtype in which the data of `from` is sent and received.
at::ScalarType moved_dtype(const DTensorSpec& from, const RedistributeOptions& options) {
  return c10::isFloatingType(from.dtype()) ? options.forward_dtype.value_or(from.dtype()) : from.dtype();
}

SpecPtr in_dtype(SpecPtr spec, at::ScalarType dtype) {
  return spec->dtype() == dtype ? spec : spec->with_dtype(dtype);
}

/// Returns the spec of redistribute's result; null if it is the tensor itself.
SpecPtr result_spec(const DTensorSpec& from, Placements placements, const RedistributeOptions& options) {
  check_dtypes(options);
  auto target = normalized(std::move(placements), from.ndim(), from.mesh().ndim(), "redistribute");
  const auto dtype = moved_dtype(from, options);
  if (target == from.placements() && dtype == from.dtype()) {
    return nullptr;
  }
  return in_dtype(from.with_placements(std::move(target), /*contiguous=*/true), dtype);
}

LocalMove start_move(const at::Tensor& tensor, const DTensorSpec& to) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto* meta = dtensor_meta(tensor);
  check_not_stale(*meta, "redistribute");
  const auto from = in_dtype(meta->spec, to.dtype());
  return LocalMove(meta->local.to(to.dtype()), from, to.placements());
}

/// Wraps the moved local tensor as the result of a differentiable op on the original tensor.
class RedistributeFunction : public torch::autograd::Function<RedistributeFunction> {
 public:
  /// Autograd does not treat this as a tensor.
  struct Moved {
    at::Tensor local;
    SpecPtr spec;
    std::optional<at::ScalarType> backward_dtype;
  };

  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const Moved& moved) {
    save_spec(context, dtensor_meta(tensor)->spec);
    if (moved.backward_dtype) {
      context->saved_data["dtype"] = static_cast<int64_t>(*moved.backward_dtype);
    }
    return wrap_local(moved.local, moved.spec);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    if (!grads[0].defined()) {
      return {at::Tensor(), at::Tensor()};
    }
    const auto spec = saved_spec(context);
    RedistributeOptions options;
    if (const auto dtype = context->saved_data.find("dtype"); dtype != context->saved_data.end()) {
      options.forward_dtype = static_cast<at::ScalarType>(dtype->second.toInt());
    }
    const auto grad = redistribute(grads[0], gradient_placements(spec->placements()), options);
    return {grad.to(spec->dtype()), at::Tensor()};
  }
};

/// Converts `placements` of a sub-mesh to those of `root`: `axes` has the indices of its axes there. Other axes are
/// Replicate.
Placements lifted(const Placements& placements, const std::vector<size_t>& axes, size_t root_ndim) {
  Placements result(root_ndim, Replicate());
  for (size_t i = 0; i < axes.size(); ++i) {
    result[axes[i]] = placements[i];
  }
  c10::SmallVector<size_t, 4> order;
  for (const size_t axis : shard_order(placements)) {
    order.push_back(axes[axis]);
  }
  return with_shard_order(std::move(result), order);
}

/// Returns the axes of `root` that `mesh` consists of.
std::vector<size_t> axes_in_root(const DeviceMesh& mesh, const DeviceMesh& root) {
  std::vector<size_t> axes;
  for (const auto& name : mesh.axis_names()) {
    const auto found = std::ranges::find(root.axis_names(), name);
    TESSERA_CHECK(ValueError, found != root.axis_names().end(),
                  "redistribute: axis \"{}\" of {} is not one of {}'s own axes (it was made by flatten); use a mesh of "
                  "those",
                  name, mesh, root);
    axes.push_back(static_cast<size_t>(found - root.axis_names().begin()));
  }
  return axes;
}

/// Returns the same local tensor as part of a DTensor on another mesh. Along axes that only one of the meshes has, the
/// ranks hold copies.
class ChangeMeshFunction : public torch::autograd::Function<ChangeMeshFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const SpecPtr& to) {
    const auto* meta = dtensor_meta(tensor);
    check_not_stale(*meta, "redistribute");
    save_spec(context, meta->spec);
    const at::AutoDispatchBelowADInplaceOrView below;
    return wrap_local(meta->local.clone(), to);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    if (!grads[0].defined()) {
      return {at::Tensor(), at::Tensor()};
    }
    const auto spec = saved_spec(context);
    return {redistribute(grads[0], spec->mesh(), gradient_placements(spec->placements())), at::Tensor()};
  }
};

/// Returns the tensor on its mesh's root.
at::Tensor on_root(const at::Tensor& tensor, const DeviceMesh& root) {
  const auto& spec = dtensor_spec(tensor);
  if (spec->mesh() == root) {
    return tensor;
  }
  const auto axes = axes_in_root(spec->mesh(), root);
  auto placements = lifted(spec->placements(), axes, static_cast<size_t>(root.ndim()));
  return ChangeMeshFunction::apply(tensor, DTensorSpec::make(root, std::move(placements), spec->meta()));
}

}  // namespace

Placements gradient_placements(const Placements& placements) {
  Placements result = placements;
  for (auto& placement : result) {
    if (placement.is_partial()) {
      placement = Replicate();
    }
  }
  return result;
}

LocalMove::LocalMove(const at::Tensor& local, SpecPtr from, const Placements& to)
    : from_(std::move(from)), current_(from_->placements()), local_(local) {
  check_reductions(*from_);
  const RedistributeRange range("redistribute", current_, to);
  steps_ = plan_redistribute(current_, to);
  start_next();
}

void LocalMove::start_next() {
  while (next_ < steps_.size()) {
    const auto& step = steps_[next_++];
    auto started = start_step(local_, step, *from_, current_);
    current_ = after_step(std::move(current_), step);
    if (step.communicates()) {
      collective_ = std::move(started.collective);
      finish_ = std::move(started.finish);
      return;
    }
    local_ = started.wait();
  }
}

at::Tensor LocalMove::wait() {
  while (finish_) {
    const RedistributeRange range("wait for redistribute", from_->placements(), current_);
    collective_.wait();
    local_ = std::exchange(finish_, nullptr)();
    start_next();
  }
  return with_canonical_strides(local_);
}

at::Tensor redistribute_local(const at::Tensor& local, const DTensorSpec& from, const Placements& to) {
  return LocalMove(local, from.with_placements(from.placements()), to).wait();
}

at::Tensor redistribute(const at::Tensor& tensor, Placements placements, RedistributeOptions options) {
  return redistribute_async(tensor, std::move(placements), options).wait();
}

PendingRedistribute redistribute_async(const at::Tensor& tensor, Placements placements, RedistributeOptions options) {
  PendingRedistribute pending(tensor, options);
  pending.result_ = result_spec(*dtensor_spec(tensor), std::move(placements), options);
  if (pending.result_) {
    pending.move_.emplace(start_move(tensor, *pending.result_));
  }
  return pending;
}

at::Tensor PendingRedistribute::wait() {
  if (!result_) {
    return tensor_;
  }
  at::Tensor local;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    local = move_->wait();
  }
  return RedistributeFunction::apply(
      tensor_, RedistributeFunction::Moved{
                   .local = std::move(local), .spec = result_, .backward_dtype = options_.backward_dtype});
}

at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements,
                        RedistributeOptions options) {
  const auto& from = dtensor_spec(tensor)->mesh();
  if (from == mesh) {
    return redistribute(tensor, std::move(placements), options);
  }
  const auto root = from.root();
  TESSERA_CHECK(
      ValueError, root == mesh.root(),
      "redistribute: {} and {} are not sub-meshes of one mesh; gather with full_tensor() and distribute_tensor()", from,
      mesh);
  const auto target = normalized(std::move(placements), tensor.dim(), mesh.ndim(), "redistribute");
  auto moved = redistribute(on_root(tensor, root),
                            lifted(target, axes_in_root(mesh, root), static_cast<size_t>(root.ndim())), options);
  if (mesh == root) {
    return moved;
  }
  return ChangeMeshFunction::apply(moved, DTensorSpec::make(mesh, target, dtensor_spec(moved)->meta()));
}

}  // namespace tessera
