#include "comm/shm/file_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/open_files.h"

namespace tessera {

namespace {

constexpr const char* kNamePrefix = "tessera_";

/// Returns the system's name of an open file; for in_memory(), "/memfd:tessera_arena (deleted)".
std::string file_name(const FileDescriptor& file) {
  std::array<char, 256> name{};
  const auto size = readlink(file.path().c_str(), name.data(), name.size());
  return {name.data(), static_cast<size_t>(std::max<ssize_t>(size, 0))};
}

}  // namespace

CommError system_error(const std::string& what) {
  return CommError(fmt::format("{}: {}", what, std::strerror(errno)));
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (number_ >= 0) {
    close(number_);
  }
}

FileDescriptor FileDescriptor::in_memory(const std::string& label) {
  FileDescriptor file(above_standard(memfd_create((kNamePrefix + label).c_str(), MFD_CLOEXEC)));
  if (!file) {
    throw system_error("memfd_create");
  }
  return file;
}

// O_PATH finds a file without opening it, because opening a device or a pipe may have side effects.
FileDescriptor FileDescriptor::open_own(const std::string& what, const std::string& path) {
  const FileDescriptor place(above_standard(::open(path.c_str(), O_PATH | O_CLOEXEC)));
  struct stat status {};
  if (!place || fstat(place.number(), &status) != 0) {
    throw system_error(fmt::format("{} {}", what, path));
  }
  const std::string name = file_name(place);
  TESSERA_CHECK(CommError, name.starts_with(std::string("/memfd:") + kNamePrefix) && status.st_uid == geteuid(),
                "{} {}: it is {} of user {}; only the shared memory of this library in processes of this user, {}, is "
                "opened",
                what, path, name, status.st_uid, geteuid());
  FileDescriptor file(above_standard(::open(place.path().c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY)));
  if (!file) {
    throw system_error(fmt::format("{} {}", what, path));
  }
  return file;
}

std::string FileDescriptor::path() const {
  return fmt::format("/proc/{}/fd/{}", getpid(), number_);
}

void FileDescriptor::resize(int64_t bytes) {
  const std::string fault = past_size_limit(static_cast<uint64_t>(bytes));
  TESSERA_CHECK(CommError, fault.empty(), "shared memory: {}", fault);
  if (ftruncate(number_, bytes) != 0) {
    throw system_error(fmt::format("{} bytes of shared memory", bytes));
  }
}

int64_t FileDescriptor::size() const {
  struct stat status {};
  return fstat(number_, &status) == 0 ? status.st_size : -1;
}

FileMapping::FileMapping(const FileDescriptor& file, int64_t offset, int64_t bytes, Access access) : bytes_(bytes) {
  const int protection = access == Access::Read ? PROT_READ : PROT_READ | PROT_WRITE;
  void* const memory = mmap(nullptr, bytes, protection, MAP_SHARED, file.number(), offset);
  if (memory == MAP_FAILED) {
    throw system_error(fmt::format("mapping {} bytes of shared memory", bytes));
  }
  base_ = static_cast<char*>(memory);
}

FileMapping& FileMapping::operator=(FileMapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

FileMapping::~FileMapping() {
  if (base_ != nullptr) {
    munmap(base_, bytes_);
  }
}

}  // namespace tessera
