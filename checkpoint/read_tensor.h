#pragma once
// Bytes of a catalog's tensors into memory, verified; internal to this package.

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "checkpoint/catalog.h"
#include "checkpoint/file_io.h"

namespace tessera::dcp {

/// Reads from files that it keeps open, and through one buffer. Thread safety: for one thread at a time.
class TensorReader {
 public:
  /// Fills `out`, a contiguous host tensor of box.sizes, with the elements of `box`, cast to its dtype. Where the parts
  /// have checksums, whole blocks are read and verified. `key` is for messages. Throws CheckpointError.
  void read(const StoredTensor& tensor, const std::string& key, const Box& box, const at::Tensor& out);

 private:
  void read_common(const StoredTensor& tensor, const StoredPart& part, const Box& read, const CheckedBlock* checked,
                   const std::string& key, const Box& box, const at::Tensor& out);
  const File& file_at(const std::string& path);

  std::map<std::string, File> files_;
  std::vector<char> buffer_;
};

}  // namespace tessera::dcp
