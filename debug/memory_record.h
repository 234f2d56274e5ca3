#pragma once
// MemoryRecord: which memory was alive when, and what it was for.
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
  Parameters,  // and buffers; of sharded ones, this rank's part
  OptimizerState,
  Gradients,            // of parameters, and what their reductions need
  GatheredParameters,   // while a unit of fully_shard is whole, and what is sent for it
  Activations,          // allocated in a forward, also in one that backward repeats
  ActivationGradients,  // allocated in backward, and not for parameters
  FreeBlocks,           // that units keep for each other
  Other,                // the optimizer's temporary tensors, batches, ...
};
constexpr size_t kMemoryCategories = 8;

std::string_view to_string(MemoryCategory category);

/// Piece of memory, from where it is allocated to where it is freed.
struct MemoryBlock {
  uintptr_t address = 0;
  int64_t bytes = 0;
  MemoryCategory category = MemoryCategory::Other;
  size_t module = 0;  // in MemoryRecord::modules
};

struct MemoryEvent {
  int64_t ns = 0;    // since the recording began
  size_t block = 0;  // in MemoryRecord::blocks
  bool begins = true;
};

struct MemoryStepEnd {
  int64_t step = 0;
  int64_t ns = 0;
  size_t events = 0;  // that came before it
};

struct MemoryRecord {
  int rank = 0;
  std::vector<std::string> modules;  // the first is "outside of modules"
  std::vector<MemoryBlock> blocks;
  std::vector<MemoryEvent> events;  // in order
  std::vector<MemoryStepEnd> step_ends;
};

/// Memory of a category and a module.
struct MemoryRow {
  MemoryCategory category = MemoryCategory::Other;
  std::string module;
  int64_t bytes = 0;
  int64_t blocks = 0;
  bool operator==(const MemoryRow&) const = default;
};

/// Returns what is alive after so many events, the largest first.
std::vector<MemoryRow> alive_after(const MemoryRecord& record, size_t events);

int64_t total_bytes(const std::vector<MemoryRow>& rows);

/// Returns the number of events after which most bytes are alive.
size_t find_peak(const MemoryRecord& record);

/// Returns what has become more from the first step's end to the last one's, and by how much: a leak, if it does so in
/// each step. Empty for a single step.
std::vector<MemoryRow> find_growth(const MemoryRecord& record);

}  // namespace tessera
