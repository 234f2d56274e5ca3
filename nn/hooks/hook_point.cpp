#include "nn/hooks/hook_point.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <algorithm>

#include "base/error.h"
#include "base/report.h"
#include "nn/hooks/clone_scope.h"
#include "nn/hooks/recomputable_call.h"

namespace tessera {

void detail::HookTable::remove(uint64_t id) {
  for (auto& list : lists) {
    if (list == nullptr) continue;
    const auto found = std::ranges::find(*list, id, &HookRecord::id);
    if (found == list->end()) continue;
    (*found)->active = false;
    auto rest = std::make_shared<HookList>(*list);
    rest->erase(rest->begin() + (found - list->begin()));
    list = std::move(rest);
    --hooks;
    return;
  }
}

void HookHandle::remove() {
  if (const auto table = table_.lock()) table->remove(id_);
  table_.reset();
}

detail::HookTable& HookPoint::hook_table() {
  if (table_ == nullptr) table_ = std::make_shared<detail::HookTable>();
  return *table_;
}

HookHandle HookPoint::add_hook(detail::HookKind kind, ForwardHook hook, HookOrder order) {
  auto& hooks = hook_table();
  auto& list = hooks.lists[static_cast<int>(kind)];
  auto longer = list == nullptr ? std::make_shared<detail::HookList>() : std::make_shared<detail::HookList>(*list);
  auto record = std::make_shared<detail::HookRecord>();
  record->id = hooks.next_id++;
  record->run = std::move(hook);
  HookHandle handle(table_, record->id);
  longer->insert(order == HookOrder::Prepend ? longer->begin() : longer->end(), std::move(record));
  list = std::move(longer);
  ++hooks.hooks;
  return handle;
}

HookHandle HookPoint::register_forward_pre_hook(ForwardHook hook, HookOrder order) {
  TESSERA_CHECK(ValueError, hook != nullptr, "register_forward_pre_hook: the hook is empty");
  return add_hook(detail::HookKind::Pre, std::move(hook), order);
}

HookHandle HookPoint::register_forward_hook(ForwardHook hook, HookOrder order) {
  TESSERA_CHECK(ValueError, hook != nullptr, "register_forward_hook: the hook is empty");
  return add_hook(detail::HookKind::Post, std::move(hook), order);
}

HookHandle HookPoint::register_exception_hook(ExceptionHook hook, HookOrder order) {
  TESSERA_CHECK(ValueError, hook != nullptr, "register_exception_hook: the hook is empty");
  auto adapted = [hook = std::move(hook)](HookPoint& point, TensorRefs) { hook(point); };
  return add_hook(detail::HookKind::Exception, std::move(adapted), order);
}

void HookPoint::wrap_forward(ForwardWrapper wrapper) {
  TESSERA_CHECK(ValueError, wrapper != nullptr, "wrap_forward: the wrapper is empty");
  TESSERA_CHECK(StateError, !is_forward_wrapped(),
                "wrap_forward: the forward of {} has a wrapper already, such as activation checkpointing; it can have "
                "one",
                type_name());
  auto& hooks = hook_table();
  hooks.wrapper = std::make_shared<const ForwardWrapper>(std::move(wrapper));
  ++hooks.hooks;
}

void HookPoint::attach(std::type_index type, std::shared_ptr<void> state) {
  TESSERA_CHECK(ValueError, state != nullptr, "attach: null state of type {} for {}", c10::demangle(type.name()),
                type_name());
  TESSERA_CHECK(StateError, find(type) == nullptr, "attach: {} has an attached {} already; detach it first",
                type_name(), c10::demangle(type.name()));
  hook_table().attachments.emplace_back(type, std::move(state));
}

std::shared_ptr<void> HookPoint::find(std::type_index type) const noexcept {
  if (table_ == nullptr) return nullptr;
  for (const auto& [attached_type, state] : table_->attachments) {
    if (attached_type == type) return state;
  }
  return nullptr;
}

std::shared_ptr<void> HookPoint::detach(std::type_index type) noexcept {
  auto state = find(type);
  if (state != nullptr) std::erase_if(table_->attachments, [&](const auto& slot) { return slot.first == type; });
  return state;
}

void HookPoint::check_cloneable() const {
  const auto renewed = CloneScope::renewed(*this);
  const bool has_others =
      table_ != nullptr && (table_->hooks > renewed.hooks || table_->attachments.size() > renewed.attachments);
  TESSERA_CHECK(NotImplementedError, !has_others,
                "clone: {} has hooks or state attached (fully_shard and parallelize_module attach both), which belong "
                "to this module alone; clone the model before it is sharded, or, with units only, by clone_sharded",
                type_name());
}

HookedCall::HookedCall(HookPoint& point) : point_(point) {
  if (point.table_ == nullptr) return;
  std::ranges::copy(point.table_->lists, lists_);
  wrapper_ = point.table_->wrapper;
}

void HookedCall::run_wrapped(const std::function<void()>& forward, std::unique_ptr<RecomputableCall> again) {
  (*wrapper_)(point_, forward, std::move(again));
}

void HookedCall::run(detail::HookKind kind, TensorRefs tensors) {
  const auto& list = lists_[static_cast<int>(kind)];
  if (list == nullptr) return;
  for (const auto& hook : *list) {
    if (hook->active) hook->run(point_, tensors);
  }
}

void HookedCall::failed() noexcept {
  const auto& list = lists_[static_cast<int>(detail::HookKind::Exception)];
  if (list == nullptr) return;
  for (auto hook = list->rbegin(); hook != list->rend(); ++hook) {
    if (!(*hook)->active) continue;
    try {
      (*hook)->run(point_, {});
    } catch (const std::exception& error) {
      report_failure("an exception hook of {} threw: {}", point_.type_name(), error.what());
    } catch (...) {
      report_failure("an exception hook of {} threw", point_.type_name());
    }
  }
}

bool is_forward_stopped() noexcept {
  const auto exception = std::current_exception();
  if (exception == nullptr) return false;
  try {
    std::rethrow_exception(exception);
  } catch (const StopForward&) {
    return true;
  } catch (...) {
    return false;
  }
}

HookPoint* find_hook_point(torch::nn::Module& module) noexcept {
  return dynamic_cast<HookPoint*>(&module);
}

const HookPoint* find_hook_point(const torch::nn::Module& module) noexcept {
  return dynamic_cast<const HookPoint*>(&module);
}

std::string module_type_name(const torch::nn::Module& module) {
  const auto* point = find_hook_point(module);
  return point ? point->type_name() : c10::demangle(typeid(module).name());
}

namespace {

/// Recognizes containers by name, which needs no header: they have no forward, but hooked() needs one that is not a
/// template.
std::string remedy(std::string_view type) {
  if (type == "torch::nn::SequentialImpl") {
    return "Use tessera::nn::Sequential, or give the elements instead";
  }
  if (type == "torch::nn::ModuleListImpl" || type == "torch::nn::ModuleDictImpl") {
    return "Give the elements instead, or the module that holds the container";
  }
  constexpr auto general =
      "Declare the type's holder with TESSERA_MODULE(Name) in place of TORCH_MODULE(Name), use tessera::nn::* in place "
      "of torch::nn::*, or wrap the module with tessera::hooked(module)";
  if (!type.starts_with("torch::nn::")) {
    return general;
  }
  return fmt::format(
      "{}. A layer that a module of libtorch made and calls by itself, as the linear ones of "
      "TransformerEncoderLayer, takes none of these: give that module",
      general);
}

}  // namespace

HookPoint& hook_point(torch::nn::Module& module, std::string_view caller) {
  HookPoint* const point = find_hook_point(module);
  if (point == nullptr) {
    const std::string type = c10::demangle(typeid(module).name());
    TESSERA_CHECK(StateError, false,
                  "{}: modules of type {} have no hook point, so nothing can run before and after their forward. {}",
                  caller, type, remedy(type));
  }
  return *point;
}

}  // namespace tessera
