#pragma once
// Who writes what where: integers only, the same on every rank.
//
//   rank 0 has "w" [4, 5] rows 0-1, "b" [5] whole       file: b 0-4, w 0-19 (of float32, in the order of keys)
//   rank 1 has "w" [4, 5] rows 2-3, "b" [5] whole       rank 0 writes w rows 0-1 and b, rank 1 writes w rows 2-3
//
// Every tensor lies whole in one file, whatever its cuts were; ranks write their parts of it to the same file at the
// right places. So a checkpoint is the same, byte by byte, from every world size, mesh and placements, and any tool
// that reads safetensors opens it. Only the manifest tells who wrote what, by the blocks that it has checksums of.
//
// Copies: a part that several ranks hold is written in blocks by all of them, each by the one that has least so far.
// But a plain tensor comes from the first rank that has it, all of it, and a DTensor from the ranks of that rank's
// mesh: ranks, and replicas of a model each on a mesh of its own, may have other values in a buffer, such as a batch
// norm's statistics, which must not be mixed.
//
// Thread safety: values.

#include <string>
#include <vector>

#include "checkpoint/format/box.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/value.h"

namespace tessera::dcp {

/// What a rank has of one tensor.
struct Piece {
  Section section = Section::Model;
  std::string key;  // within the section
  c10::ScalarType dtype = c10::ScalarType::Float;
  Sizes sizes;  // of the whole tensor
  Box box;
  bool is_plain = false;  // no DTensor: nothing but the program says that ranks have the same
  uint64_t mesh = 0;      // a number for the ranks that the DTensor lies on: those with another have another copy
  bool operator==(const Piece&) const = default;
};

/// Pieces as text, to be sent to ranks of the same build, and back.
std::string format_pieces(const std::vector<Piece>& pieces);
std::vector<Piece> parse_pieces(const std::string& text);

struct LayoutOptions {
  /// A file gets no further tensor that would make it longer than this.
  int64_t max_file_bytes = int64_t{5} << 30;
  /// The longest block with one checksum.
  int64_t max_block_bytes = int64_t{4} << 20;
  /// All tensors in one file of this name; "": files by section and number, "model-00001-of-00002.safetensors".
  std::string single_file = {};
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
  Box box;
  int owner = 0;
};

struct SavePlan {
  std::vector<PlannedFile> files;
  std::vector<PlannedBlock> blocks;  // in the order of files, entries and the tensor's rows

  const SafetensorsEntry& entry_of(const PlannedBlock& block) const {
    return files[block.file].header.entries[block.entry];
  }
  int64_t bytes_of(const PlannedBlock& block) const { return block.box.numel() * item_bytes(entry_of(block).dtype); }
};

/// `pieces[rank]`: what that rank has. Throws ValueError that names the key and the ranks where ranks disagree about
/// sizes or dtype, or where parts of a tensor are missing or overlap.
SavePlan make_save_plan(const std::vector<std::vector<Piece>>& pieces, const LayoutOptions& options = {});

}  // namespace tessera::dcp
