#pragma once
// Bytes of a catalog's tensors into memory, verified; internal to this package.

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/io/checkpoint_index.h"
#include "checkpoint/io/file_io.h"

namespace tessera::dcp {

/// Returns the view of `tensor` with the elements of `box`, or the tensor itself if these are all.
at::Tensor narrow_to(at::Tensor tensor, const Box& box);

/// Reads tensors in the order in which they were added, a few MB at a time, with few files open at a time. Thread
/// safety: for one thread at a time; run() has another one read (read_ahead.h).
class TensorReader {
 public:
  /// To fill `out`, a contiguous host tensor of box.sizes, with the elements of `box`, cast to its dtype. Where the
  /// parts have checksums, whole blocks are read and verified. `key` is for messages. `tensor` must outlive this.
  void add(const StoredTensor& tensor, const std::string& key, const Box& box, const at::Tensor& out);

  /// Fills all, and calls on_filled(i) after the i-th, from 0. Once. Throws CheckpointError.
  void run(const std::function<void(size_t)>& on_filled);

 private:
  // In memory at once, for pieces that cannot be read to where they belong.
  static constexpr size_t kBuffers = 3;
  // At most; a checkpoint may have more files than a process may open.
  static constexpr size_t kOpenFiles = 16;

  /// Part of a tensor under one checksum, or under none.
  struct Piece {
    const StoredPart& part;
    Box read;                     // of the stored tensor
    const CheckedBlock* checked;  // null: it has no checksum
    c10::ScalarType dtype;
    at::Tensor target;  // for the elements of `used`
    Box used;           // in read's frame
    char* direct;       // where all of it belongs as it is; null: it goes through a buffer
    size_t batch;       // with which it is read
    size_t begin;       // in that batch's buffer

    size_t bytes() const;
  };
  /// Pieces that are read in one go: small ones would have two threads wait for each other all the time.
  struct Batch {
    size_t first;
    size_t end;
    size_t bytes;
    size_t buffer_bytes;
  };
  struct Tensor {
    std::string key;
    size_t pieces_end;
  };

  void add_piece(const StoredTensor& tensor, const StoredPart& part, const Box& read, const CheckedBlock* checked,
                 const Box& box, const at::Tensor& out);
  void prepare(size_t batch);
  char* data_of(const Piece& piece);
  void read(size_t batch);
  void verify(const Piece& piece, const std::string& key);
  const File& file_at(const std::string& path);

  std::vector<Tensor> tensors_;
  std::vector<Piece> pieces_;
  std::vector<Batch> batches_;
  std::map<std::string, File> files_;
  std::array<std::vector<char>, kBuffers> buffers_;
};

/// Verifies the blocks that have checksums, this rank every `ranks`-th one from the `rank`-th on, so that together they
/// read each once. Throws CheckpointError.
void verify_blocks(const CheckpointIndex& catalog, int rank, int ranks);

}  // namespace tessera::dcp
