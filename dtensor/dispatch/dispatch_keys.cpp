// Registers dispatch() with libtorch's dispatcher, and the few ops that are not dispatched by rules.

#include <ATen/core/enum_tag.h>
#include <ATen/ops/equal.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "dtensor/dispatch/dispatch.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/gather_full.h"
#include "dtensor/propagation/op_names.h"
#include "dtensor/propagation/own_kernels.h"

namespace tessera {

namespace {

/// Ops with rules whose composite form would otherwise precede the fallback.
constexpr const char* kNotComposite = R"(
    mish_backward silu_backward linalg_matrix_rank linalg_matrix_rank.tol_tensor linalg_matrix_rank.atol_rtol_tensor
    linalg_matrix_rank.atol_rtol_float)";

/// item(): the reduced value, equal on every rank.
at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  return gather_full(*dtensor_meta(tensor)).item();
}

bool equal(const at::Tensor& a, const at::Tensor& b) {
  TESSERA_CHECK(ValueError, dtensor_meta(a) && dtensor_meta(b),
                "aten::equal: one of the tensors is a plain tensor; compare full_tensor() of the other one");
  return gather_full(*dtensor_meta(a)).equal(gather_full(*dtensor_meta(b)));
}

/// Returns whether autograd is detaching a gradient now to store it in a leaf.
bool keeps_gradient() {
  const auto node = torch::autograd::get_current_node();
  return dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get()) != nullptr;
}

/// Returns the meta of a leaf's gradient that is a materialized view. It becomes an independent tensor, because the
/// viewed one is a temporary of backward, while the next backward, the optimizer and clipping write to the gradient.
/// Its memory may be that of another materialized view.
c10::intrusive_ptr<DTensorMeta> meta_of_gradient(const at::Tensor& view) {
  const auto& meta = *dtensor_meta(view);
  check_not_stale(meta, "a leaf's gradient");
  return c10::make_intrusive<DTensorMeta>(has_own_local_memory(view) ? meta.local : meta.local.clone(), meta.spec,
                                          meta.origin);
}

/// detach() as a view of the whole tensor. Metas are immutable, so both share one, like tensor.data(). zero_grad()
/// detaches each gradient.
at::Tensor detach(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  c10::intrusive_ptr<DTensorMeta> gradient;
  if (dtensor_meta(tensor)->materialized_view && keeps_gradient()) {
    gradient = meta_of_gradient(tensor);  // before `view` shares the meta
  }
  auto view = impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true);
  if (gradient) {
    view->set_backend_meta(std::move(gradient));
  }
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(view.release()));
}

bool is_same_size(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes();
}

// set_data may turn a plain tensor into a DTensor and back: fully_shard's parameters keep their identity.
bool has_compatible_shallow_copy_type(const at::Tensor& /*self*/, const at::Tensor& /*from*/) {
  return true;
}

// The meta backend precedes PrivateUse1 if both occur: a plain tensor without memory becomes a DTensor.
bool has_compatible_shallow_copy_type_on_meta(const at::Tensor& self, const at::Tensor& from) {
  return dtensor_meta(self) || dtensor_meta(from) ||
         self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.type()->str().find("Tensor") != std::string::npos) {
      return true;
    }
  }
  return false;
}

/// detach_ is tagged like the ops of inplace_view.cpp, but leaves the tensor unchanged.
bool has_own_kernel(const c10::OperatorHandle& op) {
  static const std::vector<std::string> joins = aten_ops(kGradientJoins), others = aten_ops(kOtherOwnKernels);
  const auto name = toString(op.operator_name());
  const auto has = [&](const std::vector<std::string>& names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  return (op.hasTag(at::Tag::inplace_view) && name != "aten::detach_") || has(joins) || has(others);
}

/// Returns true for rand_like, bernoulli and similar ops, whose kernels make an empty tensor, even a DTensor, and draw
/// in place.
bool draws_by_other_ops(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded);
}

/// Ops with a CompositeExplicit kernel would run it on the DTensor as if it were a plain tensor.
void override_composite_explicit_ops(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || !op ||
        !(op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
          op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) ||
        has_own_kernel(*op) || draws_by_other_ops(*op) || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) ||
        !takes_tensors(op->schema())) {
      continue;
    }
    const std::string short_name = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(short_name.c_str(), dispatch_kernel(*op));
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type_on_meta);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  library.impl("detach", &detach);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("equal", &equal);
  library.impl("is_same_size", &is_same_size);
  for (const auto& op : aten_ops(kNotComposite)) {
    library.impl(op.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&dispatch>());
  }
  override_composite_explicit_ops(library);
}

}  // namespace tessera
