#include "comm/file_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tessera {

namespace {

/// The open file, or none, under a number that is none of stdin, stdout and stderr: where those are closed, what the
/// program prints would go there.
FileDescriptor above_standard(FileDescriptor file) {
  if (!file || file.number() > STDERR_FILENO) {
    return file;
  }
  return FileDescriptor(fcntl(file.number(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
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

FileDescriptor FileDescriptor::in_memory(const char* label) {
  FileDescriptor file = above_standard(FileDescriptor(memfd_create(label, MFD_CLOEXEC)));
  if (!file) {
    throw system_error("memfd_create");
  }
  return file;
}

FileDescriptor FileDescriptor::open(const std::string& what, const std::string& path) {
  FileDescriptor file = above_standard(FileDescriptor(::open(path.c_str(), O_RDWR | O_CLOEXEC)));
  if (!file) {
    throw system_error(fmt::format("{} {}", what, path));
  }
  return file;
}

std::string FileDescriptor::path() const {
  return fmt::format("/proc/{}/fd/{}", getpid(), number_);
}

// What is past the limit would end the process by a signal.
void FileDescriptor::resize(int64_t bytes) {
  rlimit limit{};
  TESSERA_CHECK(CommError, getrlimit(RLIMIT_FSIZE, &limit) != 0 || static_cast<rlim_t>(bytes) <= limit.rlim_cur,
                "shared memory: files of this process may have {} bytes (ulimit -f), and {} are needed", limit.rlim_cur,
                bytes);
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
