#include "testing/parity.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>

#include "dtensor/dtensor.h"
#include "dtensor/local/gather_full.h"
#include "testing/expect.h"

namespace tessera {

namespace {

[[noreturn]] void fail(const std::string& text) {
  throw ExpectationError("check_sharded_parity: " + text);
}

std::string without_prefixes(std::string name, const std::vector<std::string>& prefixes) {
  for (const auto& prefix : prefixes) {
    for (auto at = name.find(prefix); !prefix.empty() && at != std::string::npos; at = name.find(prefix)) {
      name.erase(at, prefix.size());
    }
  }
  return name;
}

/// Returns the tensor without Partial placements.
at::Tensor reduced(const at::Tensor& tensor) {
  Placements settled = placements(tensor);
  for (Placement& placement : settled) {
    placement = placement.is_partial() ? Replicate() : placement;
  }
  return redistribute(tensor.detach(), settled);
}

bool is_finite(const at::Tensor& tensor) {
  // at::isfinite has no kernel for 8-bit floating dtypes.
  return at::isfinite(tensor.is_floating_point() ? tensor.to(at::kDouble) : tensor).all().item<bool>();
}

/// Returns the largest magnitude of the gradients, ignoring NaN.
double largest_gradient(const torch::nn::Module& reference) {
  double largest = 0;
  for (const auto& parameter : reference.parameters()) {
    if (parameter.grad().defined() && parameter.grad().numel() > 0) {
      largest = std::max(largest, parameter.grad().abs().max().item<double>());
    }
  }
  return largest;
}

void compare(const std::string& what, const at::Tensor& whole, const at::Tensor& given, Tolerance tolerance,
             bool allow_plain) {
  if (!is_dtensor(given) && !allow_plain) {
    fail(what +
         " is not a DTensor: no unit has it, as where the last fully_shard, on the whole model, was left out, or "
         "it is unsharded and reshard() is to be called. Where a tensor-parallel plan left its layer plain, set "
         "allow_plain");
  }
  const at::Tensor tensor = is_dtensor(given) ? reduced(given) : given.detach();
  if (!is_finite(whole)) {
    fail(what + " is not finite in the reference, which diverged: nothing can be compared with it");
  }
  const auto layout = is_dtensor(tensor) ? dtensor_spec(tensor)->to_string() : to_string(TensorMeta::of(tensor));
  if (whole.sizes() != tensor.sizes()) {
    fail(fmt::format("{} is {}, expected {}", what, layout, to_string(TensorMeta::of(whole))));
  }
  const auto local = is_dtensor(tensor) ? to_local(tensor) : tensor;
  if (local.device() != whole.device()) {
    fail(fmt::format("the local tensor of {} is on {}, expected {}", what, local.device().str(), whole.device().str()));
  }
  const auto expected = is_dtensor(tensor) ? local_shard_of(whole, *dtensor_spec(tensor)) : whole;
  const auto text = describe_difference(local, expected, tolerance);
  if (!text.empty()) {
    fail(fmt::format("the local tensor of {}, {}: {}", what, layout, text));
  }
}

void compare_gradients(const std::string& name, const at::Tensor& reference, const at::Tensor& sharded,
                       Tolerance tolerance, bool allow_plain) {
  if (reference.grad().defined() != sharded.grad().defined()) {
    fail(fmt::format("the gradient of '{}' is {}defined, expected {}defined", name,
                     sharded.grad().defined() ? "" : "un", reference.grad().defined() ? "" : "un"));
  }
  if (reference.grad().defined()) {
    compare("the gradient of '" + name + "'", reference.grad(), sharded.grad(), tolerance, allow_plain);
  }
}

/// Continues after a difference, because ranks without one still reduce Partial tensors together.
class FirstDifference {
 public:
  void look(const std::function<void()>& at) {
    try {
      at();
    } catch (const ExpectationError&) {
      first_ = first_ ? first_ : std::current_exception();
    }
  }
  void rethrow() const {
    if (first_) {
      std::rethrow_exception(first_);
    }
  }

 private:
  std::exception_ptr first_;
};

}  // namespace

void check_sharded_parity(const torch::nn::Module& reference, const torch::nn::Module& sharded,
                          const ParityOptions& options) {
  const at::NoGradGuard no_grad;
  const auto expected = reference.named_parameters();
  const auto actual = sharded.named_parameters();
  if (expected.size() != actual.size()) {
    fail(fmt::format("{} parameters, expected {}", actual.size(), expected.size()));
  }
  auto of_gradients = options.tolerance;
  of_gradients.atol *= options.gradients ? std::min(1.0, largest_gradient(reference)) : 1;
  FirstDifference first;
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto name = without_prefixes(actual[i].key(), options.prefixes_to_ignore);
    first.look([&] {
      if (name != expected[i].key()) {
        fail(fmt::format("parameter {} is named '{}', expected '{}'", i, name, expected[i].key()));
      }
    });
    first.look([&] {
      compare("parameter '" + name + "'", expected[i].value(), actual[i].value(), options.tolerance,
              options.allow_plain);
    });
    if (options.gradients) {
      first.look(
          [&] { compare_gradients(name, expected[i].value(), actual[i].value(), of_gradients, options.allow_plain); });
    }
  }
  first.rethrow();
}

}  // namespace tessera
