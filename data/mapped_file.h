#pragma once
// Files as memory, and names for files being written. Thread safety: any number of threads may read.

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::data {

/// A file that is mapped, to be read only, while this lives. Reading it after it was cut short ends the process.
class MappedFile {
 public:
  /// Throws ValueError, with the path, if it is not a file that can be read.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return {static_cast<const char*>(data_), size_}; }

 private:
  void* data_ = nullptr;  // null for an empty file
  size_t size_ = 0;
};

/// Returns a name that no other rank takes: rename it to `path` when it is complete.
std::string unfinished_name(const std::string& path);

}  // namespace tessera::data
