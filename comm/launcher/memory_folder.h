#pragma once
// In-memory folder that the ranks of a launch share across restarts (docs/reliability.md). Internal to this package.

#include <string>

namespace tessera {

constexpr const char* kMemoryVariable = "TESSERA_MEMORY_DIR";

/// Owns a new folder, unique to the launch, and removes it on destruction. The next launcher of the same user removes
/// folders of killed launchers, which it recognizes because the system has released their locks.
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
