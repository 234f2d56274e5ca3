#include "debug/comm_debug_mode.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include "dtensor/dispatch/dispatch_scopes.h"

namespace tessera {

CommDebugMode::CommDebugMode(ModuleRef module) : scope_(*this) {
  for (const auto& item : module->named_modules("", /*include_self=*/false)) {
    auto* point = find_hook_point(*item.value());
    if (!point) {
      continue;
    }
    const auto leave = [this] {
      if (!running_.empty()) {
        running_.pop_back();
      }
    };
    hooks_.emplace_back(point->register_forward_pre_hook(
        [this, name = item.key()](HookPoint&, TensorRefs) { running_.push_back(name); }, HookOrder::Prepend));
    hooks_.emplace_back(point->register_forward_hook([leave](HookPoint&, TensorRefs) { leave(); }));
    hooks_.emplace_back(point->register_exception_hook([leave](HookPoint&) { leave(); }));
  }
}

void CommDebugMode::on_collective(Collective kind, int64_t bytes_sent) {
  const auto* op = dispatching_op();
  const bool backward = torch::autograd::get_current_graph_task_id() != -1;
  auto& entry = entries_[{.module = backward || running_.empty() ? "" : running_.back(),
                          .backward = backward,
                          .op = op ? toString(op->operator_name()) : "",
                          .collective = kind}];
  ++entry.calls;
  entry.bytes_sent += bytes_sent;
}

int64_t CommDebugMode::calls() const {
  int64_t total = 0;
  for (const auto& [key, entry] : entries_) {
    total += entry.calls;
  }
  return total;
}

int64_t CommDebugMode::calls(Collective collective) const {
  int64_t total = 0;
  for (const auto& [key, entry] : entries_) {
    total += key.collective == collective ? entry.calls : 0;
  }
  return total;
}

int64_t CommDebugMode::bytes_sent() const {
  int64_t total = 0;
  for (const auto& [key, entry] : entries_) {
    total += entry.bytes_sent;
  }
  return total;
}

std::string CommDebugMode::to_string() const {
  size_t module_width = 6;
  size_t op_width = 2;
  for (const auto& [key, entry] : entries_) {
    module_width = std::max(module_width, key.module.size());
    op_width = std::max(op_width, key.op.size());
  }
  const auto line = [&](std::string_view module, std::string_view phase, std::string_view op,
                        std::string_view collective, const auto& calls, const auto& bytes) {
    return fmt::format("{:<{}}  {:<8}  {:<{}}  {:<14}  {:>6}  {:>12}\n", module, module_width, phase, op, op_width,
                       collective, calls, bytes);
  };
  std::string text = line("module", "phase", "op", "collective", "calls", "bytes sent");
  for (const auto& [key, entry] : entries_) {
    text += line(key.module.empty() ? "-" : key.module, key.backward ? "backward" : "forward",
                 key.op.empty() ? "-" : key.op, name(key.collective), entry.calls, entry.bytes_sent);
  }
  return text + line("total", "", "", "", calls(), bytes_sent());
}

}  // namespace tessera
