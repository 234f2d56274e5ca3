#pragma once
// MemoryRecord: a history of allocations with the purpose of each.
//
//   const MemoryRecord record = timeline.stop();                    // debug/memory_timeline.h
//   const size_t peak = find_peak(record);
//   for (const MemoryRow& row : alive_after(record, peak)) {        // activations of block0: 4,194,304 bytes
//     fmt::print("{} of {}: {} bytes\n", to_string(row.category), row.module, row.bytes);
//   }
//
// Thread safety: values.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

enum class MemoryCategory : uint8_t {
  Parameters,  // and buffers; this rank's shards of sharded ones
  OptimizerState,
  Gradients,            // of parameters, including the buffers of their reductions
  GatheredParameters,   // unsharded parameters of fully_shard units, including communication buffers
  Activations,          // allocated in forward, including a recomputed one
  ActivationGradients,  // allocated in backward, but not for parameters
  FreeBlocks,           // cached by units for reuse
  Other,                // temporary tensors of the optimizer, batches, ...
};
constexpr size_t kMemoryCategories = 8;

std::string_view to_string(MemoryCategory category);

/// Memory between its allocation and its release.
struct MemoryBlock {
  uintptr_t address = 0;
  int64_t bytes = 0;
  MemoryCategory category = MemoryCategory::Other;
  size_t module = 0;  // index in MemoryRecord::modules
};

struct MemoryEvent {
  int64_t ns = 0;    // since the start of the recording
  size_t block = 0;  // index in MemoryRecord::blocks
  bool begins = true;
};

struct MemoryStepEnd {
  int64_t step = 0;
  int64_t ns = 0;
  size_t events = 0;  // number of earlier events
};

struct MemoryRecord {
  int rank = 0;
  std::vector<std::string> modules;  // the first is "outside of modules"
  std::vector<MemoryBlock> blocks;
  std::vector<MemoryEvent> events;  // in order
  std::vector<MemoryStepEnd> step_ends;
};

/// Memory by category and module.
struct MemoryRow {
  MemoryCategory category = MemoryCategory::Other;
  std::string module;
  int64_t bytes = 0;
  int64_t blocks = 0;
  bool operator==(const MemoryRow&) const = default;
};

/// Returns the live memory after this number of events, largest first.
std::vector<MemoryRow> alive_after(const MemoryRecord& record, size_t events);

int64_t total_bytes(const std::vector<MemoryRow>& rows);

/// Returns the number of events after which the most bytes are alive.
size_t find_peak(const MemoryRecord& record);

/// Returns the growth of memory from the end of the first step to the end of the last. Growth in every step is a leak.
/// Empty for a single step.
std::vector<MemoryRow> find_growth(const MemoryRecord& record);

}  // namespace tessera
