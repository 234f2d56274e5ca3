#pragma once
// Files whose every failure is an exception that names them, and the few steps that make a save survive a crash.
//
// Thread safety: a File may be used by several threads, since reads and writes say where.

#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/format/box.h"

namespace tessera::dcp {

/// An open file. Owns its descriptor. All functions throw CheckpointError with the path and the system's reason.
class File {
 public:
  /// To read; what is no regular file is an error, and never waited for.
  static File open(const std::string& path);
  /// A new file of `bytes` bytes, to write; an old one of this name is an error. read() fails.
  static File create(const std::string& path, uint64_t bytes);
  /// An existing file, to write parts of; others may write other parts, also from other hosts. read() fails.
  static File open_to_write(const std::string& path);
  ~File();
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;

  const std::string& path() const { return path_; }
  uint64_t size() const;
  void read(void* data, uint64_t bytes, uint64_t offset) const;
  void write(const void* data, uint64_t bytes, uint64_t offset) const;
  /// Returns when the disk has what was written.
  void sync() const;
  /// A hint, which never fails: the disk shall begin to write these bytes while the caller goes on.
  void begin_sync(uint64_t bytes, uint64_t offset) const noexcept;

 private:
  File(std::string path, int flags);

  std::string path_;
  int descriptor_ = -1;
};

/// Where a tensor's row-major bytes lie.
struct TensorBytes {
  uint64_t offset = 0;  // in the file
  Sizes sizes;
  int64_t item_bytes = 1;
};

/// The elements of `box`, row-major, between `data` and the file.
void write_box(const File& file, const TensorBytes& tensor, const Box& box, const void* data);
void read_box(const File& file, const TensorBytes& tensor, const Box& box, void* data);

/// Whole small files. read_text throws for one of more than `max_bytes`.
std::string read_text(const std::string& path, uint64_t max_bytes);
/// Returns when the disk has it.
void write_text(const std::string& path, std::string_view text);

/// Returns when the disk has the folder's list of names.
void sync_folder(const std::string& folder);
/// A missing parent is made too. Throws if the folder exists.
void make_folder(const std::string& folder);
/// `to` must not exist, or be an empty folder where `from` is a folder. Returns when the disk has the new name.
void rename_durably(const std::string& from, const std::string& to);

/// The folder that `path` lies in; "." if it names none.
std::string parent_folder(const std::string& path);

}  // namespace tessera::dcp
