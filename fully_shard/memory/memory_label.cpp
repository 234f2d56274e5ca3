#include "fully_shard/memory/memory_label.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <utility>

namespace tessera {

namespace {

thread_local MemoryUse current_label_use = MemoryUse::Other;
thread_local std::string_view current_label_unit;

}  // namespace

MemoryLabel::MemoryLabel(MemoryUse use, std::string_view unit)
    : previous_use_(std::exchange(current_label_use, use)), previous_unit_(std::exchange(current_label_unit, unit)) {}

MemoryLabel::~MemoryLabel() {
  current_label_use = previous_use_;
  current_label_unit = previous_unit_;
}

MemoryUse MemoryLabel::current_use() {
  return current_label_use;
}

std::string_view MemoryLabel::current_unit() {
  return current_label_unit;
}

void report_pool_block(const void* memory, size_t bytes, PoolStep step) {
  auto* const info = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  if (auto* const observer = dynamic_cast<PoolObserver*>(info)) {
    observer->on_pool_block(memory, bytes, step);
  }
}

}  // namespace tessera
