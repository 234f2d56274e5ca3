#pragma once
// The folder in memory that the ranks of a launch share over restarts (docs/reliability.md). Internal to this package.

#include <string>

namespace tessera {

constexpr const char* kMemoryVariable = "TESSERA_MEMORY_DIR";

/// Owns a new folder, which is in no other launch, and removes it at the end. What a launcher that was killed has left
/// is removed by the next one of the same user: each holds a lock of its folder, which the system takes back.
class MemoryFolder {
 public:
  explicit MemoryFolder(const std::string& parent);  // empty: /dev/shm
  ~MemoryFolder();
  MemoryFolder(const MemoryFolder&) = delete;
  MemoryFolder& operator=(const MemoryFolder&) = delete;

  const std::string& path() const { return path_; }  // "" if it could not be made

 private:
  std::string path_;
  int lock_ = -1;
};

}  // namespace tessera
