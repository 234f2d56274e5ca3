#pragma once
// Memory-mapped files, and names for files being written. Thread safety: any number of threads may read.

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::data {

/// File mapped read-only for the lifetime of this object. Reading it after the file was truncated kills the process.
class MappedFile {
 public:
  /// Throws ValueError, with the path, unless it is a readable file.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return {static_cast<const char*>(data_), size_}; }

 private:
  void* data_ = nullptr;  // null for an empty file
  size_t size_ = 0;
};

/// Returns a temporary name that no other rank uses. Rename it to `path` once the file is complete.
std::string unfinished_name(const std::string& path);

}  // namespace tessera::data
