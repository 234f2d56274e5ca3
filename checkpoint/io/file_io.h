#pragma once
// Files that throw errors with their path, and the operations that make a save durable. Thread safety: threads may
// share a File, since reads and writes take an offset.

#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/format/shard_slice.h"

namespace tessera::dcp {

inline constexpr const char* kIncomplete = ".incomplete-";  // follows the name of an uncommitted folder

/// Owns the descriptor. All functions throw CheckpointError with the path and the system's reason.
class File {
 public:
  static File open(const std::string& path);                    // for reading; throws if it is not a regular file
  static File create(const std::string& path, uint64_t bytes);  // for writing only; throws if it exists
  static File open_to_write(const std::string& path);           // for writing only; others may write other parts
  ~File();
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;

  const std::string& path() const { return path_; }
  uint64_t size() const;
  void read(void* data, uint64_t bytes, uint64_t offset) const;
  void write(const void* data, uint64_t bytes, uint64_t offset) const;
  void sync() const;                                                // returns once the data is on disk
  void begin_sync(uint64_t bytes, uint64_t offset) const noexcept;  // starts writing to disk; a hint

 private:
  File(std::string path, int flags);

  std::string path_;
  int descriptor_ = -1;
};

/// Row-major data of a tensor in a file.
struct TensorBytes {
  uint64_t offset = 0;  // in the file
  Sizes sizes;
  int64_t item_bytes = 1;
};

/// Copies the elements of `slice` between contiguous `data` and the file.
void write_slice(const File& file, const TensorBytes& tensor, const ShardSlice& slice, const void* data);
void read_slice(const File& file, const TensorBytes& tensor, const ShardSlice& slice, void* data);

std::string read_text(const std::string& path, uint64_t max_bytes);  // throws for larger files
void write_text(const std::string& path, std::string_view text);     // returns once it is on disk

void sync_folder(const std::string& folder);  // returns once its entries are on disk
void make_folder(const std::string& folder);  // creates missing parents; throws if it exists
/// Renames and returns once the name is on disk. Replaces a file, or an empty folder if `from` is a folder.
void rename_durably(const std::string& from, const std::string& to);

std::string parent_folder(const std::string& path);  // "." if it has none

}  // namespace tessera::dcp
