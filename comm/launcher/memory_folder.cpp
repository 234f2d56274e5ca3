#include "comm/launcher/memory_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

namespace tessera {

namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "tessera-memory-";

/// Opens a folder, without following a link.
int open_folder(const std::string& path) {
  return open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/// Removes left folders. A folder between creation and locking counts as one; its launcher then makes another.
void remove_left(const std::string& parent) {
  std::error_code ignored;
  std::vector<std::string> folders;
  for (const auto& entry : fs::directory_iterator(parent, ignored)) {
    if (entry.path().filename().string().starts_with(kPrefix)) {
      folders.push_back(entry.path().string());
    }
  }
  for (const auto& folder : folders) {
    const int lock = open_folder(folder);
    struct stat status {};
    if (lock >= 0 && fstat(lock, &status) == 0 && status.st_uid == geteuid() && flock(lock, LOCK_EX | LOCK_NB) == 0) {
      fs::remove_all(folder, ignored);
    }
    if (lock >= 0) {
      close(lock);
    }
  }
}

bool is_there(const std::string& path, int descriptor) {
  struct stat own {
  }, named{};
  return fstat(descriptor, &own) == 0 && stat(path.c_str(), &named) == 0 && own.st_ino == named.st_ino;
}

}  // namespace

MemoryFolder::MemoryFolder(const std::string& parent) {
  const std::string above = parent.empty() ? "/dev/shm" : parent;
  remove_left(above);
  for (int attempt = 0; attempt < 10 && path_.empty(); ++attempt) {
    auto path = fmt::format("{}/{}XXXXXX", above, kPrefix);
    if (mkdtemp(path.data()) == nullptr) {
      return;
    }
    lock_ = open_folder(path);
    if (lock_ >= 0 && flock(lock_, LOCK_EX) == 0 && is_there(path, lock_)) {
      path_ = path;
    } else if (lock_ >= 0) {
      close(lock_);
    }
  }
}

MemoryFolder::~MemoryFolder() {
  std::error_code ignored;
  if (!path_.empty()) {
    fs::remove_all(path_, ignored);
    close(lock_);
  }
}

}  // namespace tessera
