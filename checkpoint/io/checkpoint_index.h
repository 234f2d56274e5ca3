#pragma once
// What there is to load at a path: where the bytes of each tensor lie, whoever wrote them.
//
//   a folder with tessera.json       ours: tensors with checksums, and values
//   a folder with an index           of Hugging Face tools, or PyTorch's consolidated one: the tensors that it names,
//                                    each from the file that it names; all is the model's
//   a folder of .safetensors files   the same; parts of tensors too, as PyTorch's ranks write them
//   one .safetensors file            the same
//
// Files whose names begin with a dot do not count, and of variants (model.fp16.safetensors) those that are asked for.
//
// Everything is checked against everything else here, so that reading can rely on it: sizes of files, headers, which
// file has which tensor, parts that make up their tensor. Thread safety: values.

#include <c10/core/ScalarType.h>

#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/box.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/value.h"

namespace tessera::dcp {

/// A part of a tensor, row-major, in one file.
struct StoredPart {
  std::string file;     // with its folder
  uint64_t offset = 0;  // in the file
  Box box;              // of the tensor
  /// With checksums, covering the part; empty: there are none. Boxes are of the tensor.
  std::vector<CheckedBlock> blocks;
};

struct StoredTensor {
  c10::ScalarType dtype = c10::ScalarType::Float;
  Sizes sizes;
  std::vector<StoredPart> parts;
  std::string unknown_dtype = {};  // not empty: the tensor cannot be read (safetensors.h)
};

struct CheckpointIndex {
  std::string path;
  std::map<Section, std::map<std::string, StoredTensor>> tensors;  // by the section's own keys
  std::map<Section, Values> values;
};

/// `variant`: as in LoadOptions. Throws CheckpointError that names the file, and the key where there is one.
CheckpointIndex open_catalog(const std::string& path, const std::string& variant = {});

}  // namespace tessera::dcp
