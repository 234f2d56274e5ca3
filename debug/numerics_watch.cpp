#include "debug/numerics_watch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/context/flight_record.h"
#include "comm/process_group.h"
#include "dtensor/local/dtensor_impl.h"
#include "fully_shard/fsdp_module.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

constexpr int64_t kScalars = 3;  // per tensor that is not on the CPU

bool is_unit(torch::nn::Module& module) {
  return find_fsdp(module).has_value();
}

bool has_unit(torch::nn::Module& model) {
  for (const auto& module : model.modules()) {
    if (is_unit(*module)) {
      return true;
    }
  }
  return false;
}

std::string_view describe(WatchedTensor kind) {
  return kind == WatchedTensor::Output           ? "the output of"
         : kind == WatchedTensor::OutputGradient ? "the gradient of the output of"
                                                 : "the gradient of";
}

}  // namespace

std::string to_string(const NonFiniteTensor& found) {
  return fmt::format("step {}, rank {}: {} '{}' has {}", found.step, found.rank, describe(found.kind), found.name,
                     found.is_nan ? "NaN" : "infinity");
}

struct NumericsWatch::Numbers {
  double square_sum = 0;
  std::optional<double> max_abs = std::nullopt;

  static double to_max_abs(double min, double max) { return std::isnan(min) ? min : std::max(-min, max); }
};

struct NumericsWatch::Reading {
  size_t name = 0;
  WatchedTensor kind = WatchedTensor::Output;
  Numbers numbers = {};
  at::Tensor scalars = {};  // replaces numbers on a GPU, where reading them immediately would wait
};

struct NumericsWatch::Readings {
  bool reads_max_abs = false;
  std::mutex mutex;  // because autograd's threads add entries
  std::vector<Reading> all;
  std::vector<ScopedHook> hooks;

  void add(size_t name, WatchedTensor kind, const at::Tensor& tensor) {
    const at::NoGradGuard no_grad;
    const auto* const meta = dtensor_meta(tensor);
    const auto local = meta ? meta->local : tensor;
    if (local.numel() == 0 || !local.is_floating_point()) {
      return;
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    const bool is_flat = local.scalar_type() == at::kFloat && local.is_contiguous();
    const auto flat = is_flat ? local.view(-1) : local.to(at::kFloat).reshape(-1);
    Reading reading{.name = name, .kind = kind};
    if (flat.is_cpu()) {
      reading.numbers = read_now(flat);
    } else {  // a GPU's dot product has a size limit
      const auto [min, max] = at::aminmax(flat);
      reading.scalars = at::stack({at::linalg_vector_norm(flat, 2).square(), min, max});
    }
    const std::lock_guard lock(mutex);
    all.push_back(std::move(reading));
  }

  /// Checks elements only if the sum of squares is not finite, which may be an overflow. (Vector norms and similar ops
  /// are not vectorized on the CPU, and take ten times as long as a dot product.)
  Numbers read_now(const at::Tensor& flat) const {
    Numbers numbers{.square_sum = *at::dot(flat, flat).const_data_ptr<float>()};
    if (reads_max_abs || !std::isfinite(numbers.square_sum)) {
      const auto [min, max] = at::aminmax(flat);
      numbers.max_abs = Numbers::to_max_abs(min.item<float>(), max.item<float>());
    }
    return numbers;
  }

  std::vector<Reading> take() {
    const std::lock_guard lock(mutex);
    auto taken = std::exchange(all, {});
    std::vector<at::Tensor> scalars;
    for (const auto& reading : taken) {
      if (reading.scalars.defined()) {
        scalars.push_back(reading.scalars);
      }
    }
    if (scalars.empty()) {
      return taken;
    }
    const auto values = at::stack(scalars).cpu();
    const auto* value = values.const_data_ptr<float>();
    for (auto& reading : taken) {
      if (reading.scalars.defined()) {
        reading.numbers = {.square_sum = value[0], .max_abs = Numbers::to_max_abs(value[1], value[2])};
        value += kScalars;
      }
    }
    return taken;
  }
};

NumericsWatch::NumericsWatch(ModuleRef model, Options options)
    : model_(model), readings_(std::make_shared<Readings>()) {
  readings_->reads_max_abs = options.max_abs;
  const bool every_module = options.every_module || !has_unit(*model);
  for (const auto& item : model->named_modules("", /*include_self=*/true)) {
    auto* const point = find_hook_point(*item.value());
    if (!point || !(every_module || is_unit(*item.value()))) {
      continue;
    }
    const auto watch = [readings = std::weak_ptr(readings_), name = names_.size()](HookPoint&, TensorRefs outputs) {
      const auto own = readings.lock();
      if (!own || !at::GradMode::is_enabled()) {  // a validation is not watched
        return;
      }
      for (const at::Tensor* output : outputs) {
        own->add(name, WatchedTensor::Output, *output);
        if (output->requires_grad()) {
          output->register_hook([readings, name](const at::Tensor& gradient) {
            if (const auto alive = readings.lock(); alive && gradient.defined()) {
              alive->add(name, WatchedTensor::OutputGradient, gradient);
            }
          });
        }
      }
    };
    readings_->hooks.emplace_back(point->register_forward_hook(watch));
    names_.push_back(item.key().empty() ? "model" : item.key());
  }
  for (const auto& item : model->named_parameters()) {
    names_.push_back(item.key());
  }
}

NumericsWatch::~NumericsWatch() = default;

void NumericsWatch::read_gradients() {
  const auto parameters = model_->parameters();
  const size_t first = names_.size() - parameters.size();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (const auto& gradient = parameters[i].grad(); gradient.defined()) {
      readings_->add(first + i, WatchedTensor::ParameterGradient, gradient);
    }
  }
}

std::optional<NonFiniteTensor> NumericsWatch::agree(int64_t place, bool is_nan, int64_t step) const {
  int rank = 0;
  // Position in the rank's step, module or parameter, kind, NaN.
  const auto own = at::empty({4}, at::kLong);
  auto* const fields = own.mutable_data_ptr<int64_t>();
  std::fill_n(fields, 4, std::numeric_limits<int64_t>::max());
  if (place >= 0) {
    const auto& found = numbers_[static_cast<size_t>(place)];
    fields[0] = place;
    fields[1] = std::find(names_.begin(), names_.end(), found.name) - names_.begin();
    fields[2] = static_cast<int64_t>(found.kind);
    fields[3] = is_nan ? 1 : 0;
  }
  at::Tensor all = own.unsqueeze(0);
  if (is_initialized() && get_world_size() > 1) {
    const FlightLabel label("numerics");
    all = at::empty({get_world_size(), 4}, at::kLong);
    all_gather(all.view(-1), own, default_group());
    rank = static_cast<int>(all.select(1, 0).argmin().item<int64_t>());
  }
  const auto* const first = all.const_data_ptr<int64_t>() + 4 * static_cast<ptrdiff_t>(rank);
  if (first[0] == std::numeric_limits<int64_t>::max()) {
    return std::nullopt;
  }
  return NonFiniteTensor{.step = step,
                         .rank = rank,
                         .name = names_[static_cast<size_t>(first[1])],
                         .kind = static_cast<WatchedTensor>(first[2]),
                         .is_nan = first[3] == 1};
}

std::optional<NonFiniteTensor> NumericsWatch::check(int64_t step) {
  read_gradients();
  const auto readings = readings_->take();
  numbers_.clear();
  int64_t first = -1;
  std::map<std::pair<size_t, WatchedTensor>, size_t> places;  // indices in numbers_
  for (const auto& reading : readings) {
    const auto [found, is_new] = places.try_emplace({reading.name, reading.kind}, numbers_.size());
    if (is_new) {
      numbers_.push_back({.name = names_[reading.name], .kind = reading.kind});
    }
    auto& numbers = numbers_[found->second];
    numbers.norm = std::hypot(numbers.norm, std::sqrt(reading.numbers.square_sum));
    const auto& max_abs = reading.numbers.max_abs;
    if (max_abs && !(numbers.max_abs && (std::isnan(*numbers.max_abs) || *numbers.max_abs > *max_abs))) {
      numbers.max_abs = max_abs;
    }
    if (first < 0 && max_abs && !std::isfinite(*max_abs)) {
      first = static_cast<int64_t>(found->second);
    }
  }
  const bool is_nan = first >= 0 && std::isnan(*numbers_[static_cast<size_t>(first)].max_abs);
  return agree(first, is_nan, step);
}

}  // namespace tessera
