#include "fully_shard/autograd/unit_outputs.h"

#include <ATen/ops/as_strided.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "fully_shard/autograd/autograd_boundary.h"
#include "fully_shard/memory/tensor_memory.h"

namespace tessera {

namespace {

using torch::autograd::CreationMeta;

CreationMeta creation_of(const at::Tensor& view) {
  return torch::autograd::impl::get_view_autograd_meta(view)->get_creation_meta();
}

/// A view that can be made again of another tensor, with nothing lost: a hook would be.
bool is_plain_view(const at::Tensor& tensor) {
  return tensor.is_view() && tensor._base().requires_grad() && creation_of(tensor) == CreationMeta::DEFAULT &&
         torch::autograd::impl::hooks(tensor).empty() && !tensor.retains_grad();
}

at::Tensor base_of(const at::Tensor& tensor) {
  return is_plain_view(tensor) ? at::Tensor(tensor._base()) : tensor;
}

/// The view that `view` is of its base.
at::Tensor view_again(const at::Tensor& view, const at::Tensor& base) {
  const auto& info = torch::autograd::impl::get_view_autograd_meta(view)->get_backward_view();
  return info.has_view_fn() ? info.view_fn()(base)
                            : base.as_strided(view.sizes(), view.strides(), view.storage_offset());
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  return memory_of(a) && memory_of(a) == memory_of(b);
}

/// As those of chunk(), which do not overlap.
bool are_segments(const at::Tensor& a, const at::Tensor& b) {
  return a.is_view() && b.is_view() && a._base().is_same(b._base()) &&
         creation_of(a) == CreationMeta::MULTI_OUTPUT_NODE && creation_of(b) == CreationMeta::MULTI_OUTPUT_NODE;
}

bool is_seen(const AliasedTensor& input, TensorRefs outputs) {
  return std::ranges::any_of(outputs, [&](const at::Tensor* output) {
    return output->requires_grad() && base_of(*output).is_same(input.alias());
  });
}

void check_change(const AliasedTensor& changed, const std::vector<AliasedTensor>& inputs, UnitTitle unit) {
  const auto is_shared = [&](const AliasedTensor& other) {
    return !other.alias().is_same(changed.alias()) && other.original().requires_grad() &&
           share_memory(other.alias(), changed.alias());
  };
  const auto& input = changed.original();
  const bool shares = std::ranges::any_of(inputs, is_shared);
  TESSERA_CHECK(StateError, changed.can_share_history() && !shares,
                "{}: forward of the unit {} changed an input of sizes {} in place, which {}, so that the "
                "change has no place in the history of {}. Use the op out of place, or on a clone() of the input",
                unit.api, unit.to_string(), input.sizes(),
                shares                             ? "shares its memory with another input"
                : !changed.alias().requires_grad() ? "is detached there"
                : input.is_leaf()                  ? "is a leaf that requires a gradient"
                : input.is_view()                  ? "is a view of another tensor"
                                                   : "is to retain its gradient",
                shares ? "that" : "the caller's tensor");
}

}  // namespace

std::string UnitTitle::to_string() const {
  return fmt::format("'{}' ({})", name, label);
}

UnitOutputs::UnitOutputs(TensorRefs outputs, std::vector<AliasedTensor>& inputs, UnitTitle unit) : unit_(unit) {
  for (auto& input : inputs) {
    const bool was_changed = input.was_changed();
    if (was_changed) {
      check_change(input, inputs, unit);
    }
    if (was_changed || (input.can_share_history() && is_seen(input, outputs))) {
      bases_.push_back({.tensor = input.alias(), .alias = input.alias(), .input = &input});
    }
  }
  for (auto* output : outputs) {
    if (!output->requires_grad()) {
      continue;
    }
    const auto base = base_of(*output);
    const bool has_other_views = std::ranges::any_of(outputs, [&](const at::Tensor* other) {
      return other->requires_grad() && !other->is_same(*output) && base_of(*other).is_same(base);
    });
    auto known = std::ranges::find_if(bases_, [&](const Base& one) { return one.tensor.is_same(base); });
    if (known == bases_.end() && !has_other_views) {
      single_.push_back(output);
      continue;
    }
    if (known == bases_.end()) {
      known = bases_.insert(known, {.tensor = base, .alias = base});
    }
    views_.push_back({output, static_cast<size_t>(known - bases_.begin())});
  }
  for (auto* output : single_) {
    if (shares_memory(*output, inputs, nullptr)) {
      unchangeable_.push_back(output);
    }
  }
  for (auto& base : bases_) {
    if (shares_memory(base.tensor, inputs, base.input)) {
      unchangeable_.push_back(&base.alias);
    }
  }
}

std::vector<at::Tensor*> UnitOutputs::behind_nodes() {
  auto tensors = single_;
  for (auto& base : bases_) {
    tensors.push_back(&base.alias);
  }
  return tensors;
}

void UnitOutputs::connect() {
  for (const auto& base : bases_) {
    if (base.input) {
      base.input->share_history_behind(base.alias);
    }
  }
  for (const auto& view : views_) {
    const auto& base = bases_[view.base];
    const auto& now = base.input ? base.input->original() : base.alias;
    *view.output = view.output->is_same(base.tensor) ? now : view_again(*view.output, now);
  }
  for (const auto* tensor : unchangeable_) {
    refuse_changes(*tensor, fmt::format("{}: an output of the unit {}", unit_.api, unit_.to_string()));
  }
}

bool UnitOutputs::shares_memory(const at::Tensor& tensor, const std::vector<AliasedTensor>& inputs,
                                const AliasedTensor* own) const {
  const auto shares = [&](const at::Tensor& other) {
    return !other.is_same(tensor) && share_memory(other, tensor) && !are_segments(other, tensor);
  };
  return std::ranges::any_of(single_, [&](const at::Tensor* output) { return shares(*output); }) ||
         std::ranges::any_of(bases_, [&](const Base& base) { return shares(base.tensor); }) ||
         std::ranges::any_of(inputs, [&](const AliasedTensor& input) {
           return &input != own && input.original().requires_grad() && shares(input.original());
         });
}

}  // namespace tessera
