#pragma once
// Locates the data of each tensor in a checkpoint.
//
//   folder with tessera.json        from save(): tensors with checksums, and values
//   folder with an index            from Hugging Face tools or consolidated by PyTorch: each tensor that the index has
//   folder of .safetensors files    all tensors in them, including shards as PyTorch's ranks write them
//   one .safetensors file           all tensors in it
//
// Validates file sizes, headers, and that shards tile their tensors, so that readers can rely on them. Tensors of other
// tools belong to the model's section.

#include <c10/core/ScalarType.h>

#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/manifest.h"
#include "checkpoint/format/shard_slice.h"
#include "checkpoint/format/value.h"

namespace tessera::dcp {

/// Part of a tensor, row-major, in one file.
struct StoredPart {
  std::string file;                  // path
  uint64_t offset = 0;               // in the file
  ShardSlice slice;                  // of the tensor
  std::vector<CheckedBlock> blocks;  // slices of the tensor that cover the part; empty without checksums
};

struct StoredTensor {
  c10::ScalarType dtype = c10::ScalarType::Float;
  Sizes sizes;
  std::vector<StoredPart> parts;
  std::string unknown_dtype = {};  // if not empty, the tensor cannot be read (safetensors.h)
};

struct CheckpointIndex {
  std::string path;
  std::map<Section, std::map<std::string, StoredTensor>> tensors;  // by keys within the section
  std::map<Section, Values> values;
};

/// Validates and indexes `path`. `variant` is that of LoadOptions. Throws CheckpointError that names file and key.
CheckpointIndex open_checkpoint(const std::string& path, const std::string& variant = {});

}  // namespace tessera::dcp
