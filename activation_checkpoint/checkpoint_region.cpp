#include "activation_checkpoint/checkpoint_region.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "activation_checkpoint/shared_generator_use.h"
#include "base/error.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/random/random.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

/// Stands for an input between the two forwards, so that it is visited again.
const at::Tensor& placeholder() {
  static const at::Tensor empty = at::empty({0});
  return empty;
}

/// Returns the devices whose random numbers a call with these inputs may use: those of the inputs, and of tensors
/// created in it on the current GPU. The meta device has none.
std::vector<at::Device> generator_devices(RecomputableCall& call) {
  std::vector<at::Device> devices{at::kCPU};
  const auto add = [&](at::Device device) {
    if (!device.is_meta() && std::ranges::find(devices, device) == devices.end()) {
      devices.push_back(device);
    }
  };
  call.visit_inputs([&](const at::Tensor& tensor) { add(tensor.device()); });
  if (at::hasCUDA()) {
    const auto& gpus = at::globalContext().getAcceleratorHooksInterface(at::kCUDA);
    const auto current = gpus.getCurrentDevice();
    if (gpus.hasPrimaryContext(current)) {
      add(at::Device(at::kCUDA, current));
    }
  }
  return devices;
}

/// Returns the generators whose states a second call needs. Excludes generators that other ranks share: resetting them
/// would repeat numbers there, so draws from them are rejected (shared_generator_use.h).
std::vector<at::Generator> collect_generators(RecomputableCall& call) {
  std::vector<at::Generator> generators;
  const auto add = [&](const at::Generator& generator) {
    if (std::ranges::find(generators, generator) == generators.end()) {
      generators.push_back(generator);
    }
  };
  const bool are_shared = ranks_share_generators();
  for (const auto& device : generator_devices(call)) {
    if (!are_shared) {
      add(at::globalContext().defaultGenerator(device));
    }
    add(dtensor_generator(device.type()));
  }
  call.visit_generators(add);
  return generators;
}

/// Keeps inputs with their current history. An input that the region changes in place gets the region's history, and
/// keeping that would keep the region alive.
class InputsAsTheyAre {
 public:
  at::Tensor keep(const at::Tensor& input) {
    if (!input.defined() || (input.requires_grad() && input.is_leaf())) {
      return input;  // cannot be changed in place
    }
    const auto known = std::ranges::find_if(kept_, [&](const auto& pair) { return pair.first.is_same(input); });
    if (known != kept_.end()) {
      return known->second;  // the same tensor, passed twice
    }
    auto alias = input.detach();
    if (input.requires_grad()) {
      torch::autograd::impl::set_gradient_edge(alias, torch::autograd::impl::gradient_edge(input));
    }
    return kept_.emplace_back(input, std::move(alias)).second;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

int64_t current_version(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor._version());
}

}  // namespace

/// Hooks of the first forward for one saved tensor.
class CheckpointRegion::SlotHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit SlotHooks(std::shared_ptr<CheckpointRegion> region) : region_(std::move(region)) {}
  ~SlotHooks() override {
    if (slot_) {
      region_->drop(*slot_);
    }
  }
  void call_pack_hook(const at::Tensor& tensor) override { slot_ = region_->add_slot(tensor); }
  at::Tensor call_unpack_hook() override { return region_->unpack(slot_.value()); }

 private:
  std::shared_ptr<CheckpointRegion> region_;
  std::optional<size_t> slot_;
};

class CheckpointRegion::SlotMaker final : public SavedTensorHooks {
 public:
  explicit SlotMaker(std::shared_ptr<CheckpointRegion> region) : region_(std::move(region)) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> make() override { return std::make_unique<SlotHooks>(region_); }

 private:
  std::shared_ptr<CheckpointRegion> region_;
};

/// Hooks of the second forward. A backward inside it (a gradient that forward itself computes) finds the tensor here.
class CheckpointRegion::FillHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit FillHooks(CheckpointRegion& region) : region_(region) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.detach();
    version_ = current_version(tensor_);
    region_.fill_next(tensor_);
  }
  at::Tensor call_unpack_hook() override {
    region_.check_unchanged(tensor_, version_);
    return tensor_;
  }

 private:
  CheckpointRegion& region_;
  at::Tensor tensor_;
  int64_t version_ = 0;
};

class CheckpointRegion::FillMaker final : public SavedTensorHooks {
 public:
  explicit FillMaker(CheckpointRegion& region) : region_(region) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> make() override { return std::make_unique<FillHooks>(region_); }

 private:
  CheckpointRegion& region_;
};

CheckpointRegion::SavedMeta::SavedMeta(const at::Tensor& tensor)
    : sizes(tensor.sizes().vec()), dtype(tensor.scalar_type()), device(tensor.device()) {
  if (const auto* meta = dtensor_meta(tensor)) {
    spec = meta->spec;
  }
}

bool CheckpointRegion::SavedMeta::operator==(const SavedMeta& other) const {
  return sizes == other.sizes && dtype == other.dtype && device == other.device && !spec == !other.spec &&
         (!spec || spec->placements() == other.spec->placements());
}

std::string CheckpointRegion::SavedMeta::to_string() const {
  auto text = fmt::format("{} [{}] on {}", c10::toString(dtype), fmt::join(sizes, ", "), device.str());
  return spec ? fmt::format("a DTensor {} {}", text, spec->placements()) : text;
}

CheckpointRegion::CheckpointRegion(std::unique_ptr<RecomputableCall> again, const CheckpointOptions& options,
                                   std::string place)
    : again_(std::move(again)),
      options_(options),
      place_(std::move(place)),
      context_(options.preserve_rng_state ? collect_generators(*again_) : std::vector<at::Generator>()),
      ops_(options.ops_to_save) {
  InputsAsTheyAre kept;
  again_->visit_inputs([&](at::Tensor& tensor) {
    inputs_.emplace_back(kept.keep(tensor), /*is_output=*/false);
    tensor = placeholder();
  });
}

void CheckpointRegion::run(const std::function<void()>& forward, std::unique_ptr<RecomputableCall> again,
                           const CheckpointOptions& options, std::string place) {
  if (!at::GradMode::is_enabled()) {
    forward();
    return;
  }
  TESSERA_CHECK(NotImplementedError, !again->shares_tensors(),
                "{}: an argument points to tensors of the caller, which a region cannot keep, since it would take them "
                "away there; a copy of an argument must be one of its tensors too. Pass the tensors themselves",
                place);
  const std::shared_ptr<CheckpointRegion> region(new CheckpointRegion(std::move(again), options, std::move(place)));
  SlotMaker slots(region);
  const SavedTensorHooksScope scope(&slots);
  const SavedOpsScope ops(region->ops(), SavedOpsScope::Mode::Save);
  const SharedGeneratorUse use(options.preserve_rng_state);
  forward();
  region->is_whole_ = true;
  use.check(region->place_);
}

size_t CheckpointRegion::add_slot(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  slots_.push_back({.meta = SavedMeta(tensor), .first_version = current_version(tensor)});
  return slots_.size() - 1;
}

at::Tensor CheckpointRegion::unpack(size_t slot) {
  const std::lock_guard lock(mutex_);
  const int64_t backward = torch::autograd::get_current_graph_task_id();
  if (backward == -1 || backward != backward_ || !slots_.at(slot).tensor.defined()) {
    recompute();
    backward_ = backward;
  }
  const auto [tensor, version] = std::pair(slots_.at(slot).tensor, slots_.at(slot).version);
  if (backward == -1) {
    clear();
  }
  check_unchanged(tensor, version);
  return tensor;
}

void CheckpointRegion::drop(size_t slot) noexcept {
  const std::lock_guard lock(mutex_);
  slots_[slot].tensor.reset();
  slots_[slot].is_needed = false;
}

void CheckpointRegion::clear() {
  for (auto& slot : slots_) {
    slot.tensor.reset();
  }
  backward_ = -1;
}

void CheckpointRegion::recompute() {
  // A graph that is kept for another backward keeps its slots, but their tensors are freed with this backward.
  if (torch::autograd::get_current_graph_task_id() != -1) {
    torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
      if (const auto region = weak.lock()) {
        const std::lock_guard lock(region->mutex_);
        region->clear();
      }
    });
  }
  filled_ = 0;
  ops_.rewind();
  size_t next = 0;
  again_->visit_inputs([&](at::Tensor& tensor) { tensor = inputs_.at(next++).unpack(); });
  const auto forget_inputs = [this] { again_->visit_inputs([](at::Tensor& tensor) { tensor = placeholder(); }); };
  try {
    FillMaker filler(*this);
    const SavedTensorHooksScope scope(&filler);
    const SavedOpsScope ops(this->ops(), SavedOpsScope::Mode::Replay);
    const at::AutoGradMode grad_mode(true);
    context_.run([this] { again_->run(); });
  } catch (const StopForward&) {
  } catch (...) {
    forget_inputs();
    throw;
  }
  forget_inputs();
  check_filled();
}

void CheckpointRegion::fill_next(const at::Tensor& tensor) {
  const size_t index = filled_++;
  if (index >= slots_.size()) {
    return;
  }
  auto& slot = slots_[index];
  if (options_.determinism_check) {
    check_recomputed(slot, tensor);
  }
  if (slot.is_needed) {
    slot.tensor = tensor;
    slot.version = current_version(tensor);
  }
  // A gradient that the forward itself computes needs the tensors saved so far.
  if ((options_.early_stop || !is_whole_) && filled_ == slots_.size()) {
    throw StopForward();
  }
}

void CheckpointRegion::check_recomputed(const Slot& slot, const at::Tensor& tensor) const {
  const auto index = &slot - slots_.data();
  const SavedMeta meta(tensor);
  TESSERA_CHECK(StateError, meta == slot.meta,
                "{}: the forward that backward computes again differs from the first: tensor {} that autograd saves is "
                "{}, but was {}. A checkpointed forward must depend on its arguments and parameters alone; one "
                "that counts its calls or caches tensors cannot be checkpointed",
                place_, index, meta.to_string(), slot.meta.to_string());
  TESSERA_CHECK(StateError, current_version(tensor) == slot.first_version,
                "{}: tensor {} that autograd saves, {}, was changed in place since the first forward: it is at version "
                "{}, but was at version {}. Change parameters after backward only (optimizer.step()), and buffers that "
                "gradients depend on outside of the region",
                place_, index, meta.to_string(), current_version(tensor), slot.first_version);
}

void CheckpointRegion::check_unchanged(const at::Tensor& tensor, int64_t version) const {
  TESSERA_CHECK(StateError, current_version(tensor) == version,
                "{}: a tensor that backward needs, {}, was changed in place after autograd saved it: it is at version "
                "{}, but was saved at version {}. Change a copy, as without checkpointing",
                place_, SavedMeta(tensor).to_string(), current_version(tensor), version);
}

void CheckpointRegion::check_filled() const {
  TESSERA_CHECK(StateError, filled_ == slots_.size(),
                "{}: the forward that backward computes again differs from the first: autograd saves {} tensors, but "
                "saved {}. A checkpointed forward must depend on its arguments and parameters alone; one that counts "
                "its calls or caches tensors cannot be checkpointed",
                place_, filled_, slots_.size());
}

}  // namespace tessera
