#include "debug/memory_timeline.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/process_group.h"
#include "debug/memory_files.h"
#include "dtensor/local/dtensor_impl.h"
#include "fully_shard/memory/memory_label.h"
#include "nn/hooks/hook_point.h"
#include "optim/optimizer_fields.h"

namespace tessera {

namespace {

constexpr size_t kOutside = 0;  // index in MemoryRecord::modules

at::Tensor local_part(const at::Tensor& tensor) {
  const auto* const meta = dtensor_meta(tensor);
  return meta ? meta->local : tensor;
}

/// Returns "block0.up" for "block0.up.weight".
std::string module_of(const std::string& parameter) {
  const auto dot = parameter.rfind('.');
  return dot == std::string::npos ? "" : parameter.substr(0, dot);
}

/// Returns "block0" for "block0.up" and "block0.attention.key", for memory that modules share, such as a unit's shards.
std::string common_module(const std::string& a, const std::string& b) {
  std::string common;
  for (size_t begin = 0; begin <= std::min(a.size(), b.size());) {
    const auto end_a = std::min(a.find('.', begin), a.size()), end_b = std::min(b.find('.', begin), b.size());
    if (end_a != end_b || a.compare(begin, end_a - begin, b, begin, end_b - begin) != 0) {
      break;
    }
    common = a.substr(0, end_a);
    begin = end_a + 1;
  }
  return common;
}

}  // namespace

/// Receives the reports of libtorch's allocators and fully_shard's pools.
class MemoryTimeline::Recorder final : public c10::MemoryReportingInfoBase, public PoolObserver {
 public:
  explicit Recorder(c10::DeviceType device) : device_(device) { record_.modules = {"outside of modules"}; }

  bool memoryProfilingEnabled() const override { return true; }

  void reportMemoryUsage(void* memory, int64_t bytes, size_t /*total_allocated*/, size_t /*total_reserved*/,
                         c10::Device device) override {
    if (device.type() != device_) {
      return;
    }
    const auto address = reinterpret_cast<uintptr_t>(memory);
    const uint64_t node = current_node();
    const std::lock_guard lock(mutex_);
    end_dead();
    end(address);
    if (bytes > 0) {
      const auto [category, module] = place(node);
      begin(address, bytes, category, module);
    }
  }

  void on_pool_block(const void* memory, size_t bytes, PoolStep step) override {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    const uint64_t node = current_node();
    const std::lock_guard lock(mutex_);
    end(address);
    if (step == PoolStep::Acquired) {
      const auto [category, module] = place(node);
      begin(address, static_cast<int64_t>(bytes), category, module);
    } else if (step == PoolStep::Released) {
      begin(address, static_cast<int64_t>(bytes), MemoryCategory::FreeBlocks, kOutside);
    }
  }

  void enter(const std::string& module) {
    const std::lock_guard lock(mutex_);
    running_.push_back(number_of(module));
    note_nodes();
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    if (!running_.empty()) {
      running_.pop_back();
      note_nodes();
      makes_loss_ = running_.empty() && at::GradMode::is_enabled();
    }
  }

  /// Assigns a purpose to a tensor's memory. Adds unknown memory, which is older or from another allocator.
  void assign(const at::Tensor& tensor, MemoryCategory category, const std::string& module) {
    if (!tensor.defined() || tensor.device().type() != device_ || !tensor.has_storage() ||
        tensor.storage().nbytes() == 0) {
      return;
    }
    const auto& storage = tensor.storage();
    const auto address = reinterpret_cast<uintptr_t>(storage.data());
    const std::lock_guard lock(mutex_);
    if (auto* const block = find(address)) {
      if (block->category != MemoryCategory::GatheredParameters) {  // not of a unit that is still unsharded
        block->category = category;
        block->module = number_of(module);
      }
      return;
    }
    begin(address, static_cast<int64_t>(storage.nbytes()), category, number_of(module));
    if (category == MemoryCategory::Gradients) {
      watched_.push_back(
          {.address = address, .block = record_.blocks.size() - 1, .storage = storage.getWeakStorageImpl()});
    }
  }

  void end_step(int64_t step) {
    const std::lock_guard lock(mutex_);
    end_dead();
    record_.step_ends.push_back({.step = step, .ns = elapsed_ns(), .events = record_.events.size()});
  }

  MemoryRecord take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(record_, {});
  }

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Watched {
    uintptr_t address = 0;
    size_t block = 0;
    WeakStorage storage;
  };

  /// Returns the number of the node that backward runs, in order of creation; 0 outside backward.
  static uint64_t current_node() {
    if (torch::autograd::get_current_graph_task_id() < 0) {
      return 0;
    }
    const auto node = torch::autograd::get_current_node();
    return node ? node->sequence_nr() + 1 : 1;
  }

  std::pair<MemoryCategory, size_t> place(uint64_t node) {
    if (MemoryLabel::current_use() != MemoryUse::Other) {
      const auto unit = MemoryLabel::current_unit();
      return {MemoryLabel::current_use() == MemoryUse::Gradients ? MemoryCategory::Gradients
                                                                 : MemoryCategory::GatheredParameters,
              number_of(unit == "root" ? "" : std::string(unit))};
    }
    if (!running_.empty()) {
      return {MemoryCategory::Activations, running_.back()};
    }
    if (node > 0) {
      makes_loss_ = false;
      return {MemoryCategory::ActivationGradients, module_of_node(node - 1)};
    }
    return {makes_loss_ && at::GradMode::is_enabled() ? MemoryCategory::Activations : MemoryCategory::Other, kOutside};
  }

  size_t number_of(const std::string& module) {
    const auto [found, is_new] = numbers_.try_emplace(module, record_.modules.size());
    if (is_new) {
      record_.modules.push_back(module.empty() ? "model" : module);
    }
    return found->second;
  }

  /// Assigns nodes that this thread makes from now on to the innermost running module.
  void note_nodes() {
    if (std::this_thread::get_id() == thread_) {
      nodes_.emplace_back(at::sequence_number::peek(), running_.empty() ? kOutside : running_.back());
    }
  }

  size_t module_of_node(uint64_t node) const {
    const auto next = std::ranges::upper_bound(nodes_, node, {}, &std::pair<uint64_t, size_t>::first);
    return next == nodes_.begin() ? kOutside : std::prev(next)->second;
  }

  MemoryBlock* find(uintptr_t address) {
    const auto next = alive_.upper_bound(address);
    if (next == alive_.begin()) {
      return nullptr;
    }
    auto& block = record_.blocks[std::prev(next)->second];
    return address < block.address + static_cast<uintptr_t>(block.bytes) ? &block : nullptr;
  }

  int64_t elapsed_ns() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin_).count();
  }

  void begin(uintptr_t address, int64_t bytes, MemoryCategory category, size_t module) {
    alive_[address] = record_.blocks.size();
    record_.events.push_back({.ns = elapsed_ns(), .block = record_.blocks.size()});
    record_.blocks.push_back({.address = address, .bytes = bytes, .category = category, .module = module});
  }

  void end(uintptr_t address) {
    if (const auto found = alive_.extract(address); !found.empty()) {
      record_.events.push_back({.ns = elapsed_ns(), .block = found.mapped(), .begins = false});
    }
  }

  /// Removes gradients from before the recording, whose release the CPU allocator does not report.
  void end_dead() {
    std::erase_if(watched_, [this](const Watched& one) {
      const bool is_dead = one.storage.expired();
      const auto found = alive_.find(one.address);
      if (is_dead && found != alive_.end() && found->second == one.block) {
        end(one.address);
      }
      return is_dead;
    });
  }

  const c10::DeviceType device_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  const std::thread::id thread_ = std::this_thread::get_id();
  std::mutex mutex_;  // because autograd's threads report too
  MemoryRecord record_;
  std::map<uintptr_t, size_t> alive_;               // blocks by address
  std::map<std::string, size_t> numbers_;           // indices of modules
  std::vector<size_t> running_;                     // modules, innermost last
  std::vector<std::pair<uint64_t, size_t>> nodes_;  // modules by their first node
  std::vector<Watched> watched_;
  bool makes_loss_ = false;  // whether between the model's forward and backward
};

/// Observes the model and optimizer.
class MemoryTimeline::Recording {
 public:
  Recording(ModuleRef model, Options options);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void end_step(int64_t step) {
    read_tensors();
    recorder_->end_step(step);
  }
  MemoryRecord take() {
    read_tensors();
    auto record = recorder_->take();
    record.rank = is_initialized() ? get_rank() : 0;
    return record;
  }

 private:
  struct GradientHook {
    at::Tensor parameter;
    unsigned place;
  };
  void observe(torch::nn::Module& module, const std::string& name);
  void read_tensors();

  ModuleRef model_;
  Options options_;
  std::shared_ptr<Recorder> recorder_;
  std::vector<ScopedHook> hooks_;
  std::vector<GradientHook> gradient_hooks_;
  std::optional<c10::DebugInfoGuard> guard_;
};

MemoryTimeline::Recording::Recording(ModuleRef model, Options options) : model_(model), options_(options) {
  TESSERA_CHECK(StateError, c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) == nullptr,
                "MemoryTimeline: this thread has another timeline, or a profiler; end that first");
  const auto parameters = model->named_parameters();
  recorder_ = std::make_shared<Recorder>(parameters.is_empty() ? c10::kCPU : parameters[0].value().device().type());
  read_tensors();
  for (const auto& item : model->named_modules("", /*include_self=*/true)) {
    observe(*item.value(), item.key());
  }
  for (const auto& item : parameters) {
    if (item.value().requires_grad()) {
      const auto hook = [recorder = std::weak_ptr(recorder_),
                         name = module_of(item.key())](const at::Tensor& gradient) {
        if (const auto alive = recorder.lock()) {
          alive->assign(local_part(gradient), MemoryCategory::Gradients, name);
        }
      };
      gradient_hooks_.push_back({.parameter = item.value(), .place = item.value().register_hook(hook)});
    }
  }
  guard_.emplace(c10::DebugInfoKind::PROFILER_STATE, recorder_);
}

MemoryTimeline::Recording::~Recording() {
  guard_.reset();
  for (const auto& hook : gradient_hooks_) {
    hook.parameter.remove_hook(hook.place);
  }
}

void MemoryTimeline::Recording::observe(torch::nn::Module& module, const std::string& name) {
  auto* const point = find_hook_point(module);
  if (!point) {
    return;
  }
  const auto enter = [recorder = recorder_, name](HookPoint&, TensorRefs) { recorder->enter(name); };
  hooks_.emplace_back(point->register_forward_pre_hook(enter, HookOrder::Prepend));
  hooks_.emplace_back(
      point->register_forward_hook([recorder = recorder_](HookPoint&, TensorRefs) { recorder->leave(); }));
  hooks_.emplace_back(point->register_exception_hook([recorder = recorder_](HookPoint&) { recorder->leave(); }));
}

/// Records the tensors that model and optimizer hold between steps.
void MemoryTimeline::Recording::read_tensors() {
  struct Owner {
    at::Tensor tensor;
    MemoryCategory category;
    std::string module;
  };
  std::map<const c10::StorageImpl*, Owner> owners;
  const auto add = [&](const at::Tensor& whole, MemoryCategory category, const std::string& module) {
    const auto tensor = local_part(whole);
    if (tensor.defined() && tensor.has_storage()) {
      const auto [found, is_new] =
          owners.try_emplace(tensor.storage().unsafeGetStorageImpl(), Owner{tensor, category, module});
      found->second.module = is_new ? module : common_module(found->second.module, module);
    }
  };
  for (const auto& item : model_->named_buffers()) {
    add(item.value(), MemoryCategory::Parameters, module_of(item.key()));
  }
  for (const auto& item : model_->named_parameters()) {
    add(item.value(), MemoryCategory::Parameters, module_of(item.key()));
    add(item.value().grad(), MemoryCategory::Gradients, module_of(item.key()));
  }
  if (options_.optimizer) {
    with_types(*options_.optimizer, "MemoryTimeline", [&]<class Types>(Types) {
      for (const auto& item : model_->named_parameters()) {
        const auto found = options_.optimizer->state().find(item.value().unsafeGetTensorImpl());
        if (found != options_.optimizer->state().end()) {
          visit_fields(static_cast<typename Types::State&>(*found->second), [&](const char*, auto& field) {
            if constexpr (std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
              add(field, MemoryCategory::OptimizerState, module_of(item.key()));
            }
          });
        }
      }
    });
  }
  for (const auto& [storage, owner] : owners) {
    recorder_->assign(owner.tensor, owner.category, owner.module);
  }
}

MemoryTimeline::MemoryTimeline(ModuleRef model, Options options)
    : recording_(std::make_unique<Recording>(model, options)) {}

MemoryTimeline::~MemoryTimeline() = default;

void MemoryTimeline::end_step(int64_t step) {
  recording_->end_step(step);
}

MemoryRecord MemoryTimeline::stop() {
  TESSERA_CHECK(StateError, recording_ != nullptr, "MemoryTimeline: it was stopped before");
  return std::exchange(recording_, nullptr)->take();
}

MemoryTimelineSteps::MemoryTimelineSteps(ModuleRef model, Options options)
    : model_(model), options_(std::move(options)) {
  check_step_range("MemoryTimelineSteps", options_.steps);
}

void MemoryTimelineSteps::begin_step(int64_t step) {
  if (step == options_.steps.first && !options_.folder.empty()) {
    timeline_.emplace(model_, MemoryTimeline::Options{.optimizer = options_.optimizer});
  }
}

void MemoryTimelineSteps::end_step(int64_t step) {
  if (!timeline_) {
    return;
  }
  timeline_->end_step(step);
  if (step == options_.steps.last) {
    write_memory_files(timeline_->stop(), options_.folder);
    timeline_.reset();
  }
}

}  // namespace tessera
