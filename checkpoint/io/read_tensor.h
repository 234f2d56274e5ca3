#pragma once
// Reads and verifies the tensors of a checkpoint. Internal to this package.

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/io/checkpoint_index.h"
#include "checkpoint/io/file_io.h"

namespace tessera::dcp {

/// Returns the view of `tensor` with the elements of `slice`, or the tensor itself if these are all.
at::Tensor narrow_to(at::Tensor tensor, const ShardSlice& slice);

/// Reads tensors in the order in which they were added, a few MB at a time. Thread safety: one thread at a time; run()
/// reads in another (read_ahead.h).
class TensorReader {
 public:
  /// Adds the elements of `slice`, to be cast and written to `out`, a contiguous host tensor of slice.sizes. Verifies
  /// whole blocks if there are checksums. `key` is for messages; `tensor` must outlive this reader.
  void add(const StoredTensor& tensor, const std::string& key, const ShardSlice& slice, const at::Tensor& out);

  /// Fills all tensors and calls on_filled(i) after the i-th. Call once. Throws CheckpointError.
  void run(const std::function<void(size_t)>& on_filled);

 private:
  static constexpr size_t kBuffers = 3;     // for items that cannot be read in place
  static constexpr size_t kOpenFiles = 16;  // a checkpoint may have more files than a process may open

  struct ReadItem {  // part of a tensor with one checksum, or without
    const StoredPart& part;
    ShardSlice read;              // of the stored tensor
    const CheckedBlock* checked;  // null without a checksum
    c10::ScalarType dtype;
    at::Tensor target;  // receives the elements of `used`
    ShardSlice used;    // relative to `read`
    char* direct;       // target for reading in place; null: uses the batch's buffer
    size_t batch;       // index of its batch
    size_t begin;       // offset in the batch's buffer

    size_t bytes() const;
  };
  /// Items that are read together: small ones alone would make the threads wait for each other.
  struct Batch {
    size_t first;
    size_t end;
    size_t bytes;
    size_t buffer_bytes;
  };
  struct Tensor {
    std::string key;
    size_t items_end;
  };

  void add_item(const StoredTensor& tensor, const StoredPart& part, const ShardSlice& read, const CheckedBlock* checked,
                const ShardSlice& slice, const at::Tensor& out);
  void prepare(size_t batch);
  char* destination(const ReadItem& item);
  void read(size_t batch);
  void verify(const ReadItem& item, const std::string& key);
  const File& file_at(const std::string& path);

  std::vector<Tensor> tensors_;
  std::vector<ReadItem> items_;
  std::vector<Batch> batches_;
  std::map<std::string, File> files_;
  std::array<std::vector<char>, kBuffers> buffers_;
};

/// Verifies every `ranks`-th block from the `rank`-th on, so that all ranks together read each once. Skips parts
/// without checksums and tensors of unknown dtype. Throws CheckpointError.
void verify_blocks(const CheckpointIndex& index, int rank, int ranks);

}  // namespace tessera::dcp
