#pragma once
// Plans which rank writes which data to which file: integers only, equal on every rank. Pure functions on values.
//
//   rank 0 has "w" [4, 5] rows 0-1, "b" [5]    file: b 0-4, w 0-19 (float32; in the order of keys)
//   rank 1 has "w" [4, 5] rows 2-3, "b" [5]    rank 0 writes w rows 0-1 and b, rank 1 writes w rows 2-3
//
// Each tensor is whole in one file, so the files are equal for all layouts. A shard that several ranks hold is split
// into blocks, each written by the one with the least data so far. Plain tensors come from the first rank that has
// them, and DTensors from that rank's mesh: copies elsewhere, such as running statistics, may differ.

#include <string>
#include <vector>

#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/shard_slice.h"
#include "checkpoint/format/value.h"

namespace tessera::dcp {

struct ShardEntry {  // shard of a tensor that a rank holds
  Section section = Section::Model;
  std::string key;  // within the section
  c10::ScalarType dtype = c10::ScalarType::Float;
  Sizes sizes;  // of the whole tensor
  ShardSlice slice;
  bool is_plain = false;  // not a DTensor, so ranks may have different values
  uint64_t mesh = 0;      // hash of the mesh's ranks; other meshes may have different values
  bool operator==(const ShardEntry&) const = default;
};

/// Converts entries to text and back, for ranks of the same build.
std::string format_shard_entries(const std::vector<ShardEntry>& entries);
std::vector<ShardEntry> parse_shard_entries(const std::string& text);

struct LayoutOptions {
  int64_t max_file_bytes = int64_t{5} << 30;   // see SaveOptions
  int64_t max_block_bytes = int64_t{4} << 20;  // largest block with one checksum
  std::string single_file = {};  // name of the only file; "": "model-00001-of-00002.safetensors" and so on
};

struct PlannedFile {
  std::string name;
  Section section = Section::Model;
  SafetensorsHeader header;
  std::string header_bytes;

  uint64_t bytes() const { return header_bytes.size() + (header.entries.empty() ? 0 : header.entries.back().end); }
};

struct PlannedBlock {
  size_t file = 0;   // in SavePlan::files
  size_t entry = 0;  // in that file's header
  ShardSlice slice;
  int owner = 0;
};

struct SavePlan {
  std::vector<PlannedFile> files;
  std::vector<PlannedBlock> blocks;  // ordered by file, entry and row

  const SafetensorsEntry& entry(const PlannedBlock& block) const {
    return files[block.file].header.entries[block.entry];
  }
  int64_t block_bytes(const PlannedBlock& block) const { return block.slice.numel() * item_bytes(entry(block).dtype); }
};

/// Plans the save of `entries[rank]` on every rank. Throws ValueError that names key and ranks if they disagree about
/// sizes or dtype, or if shards are missing or overlap.
SavePlan make_save_plan(const std::vector<std::vector<ShardEntry>>& entries, const LayoutOptions& options = {});

}  // namespace tessera::dcp
