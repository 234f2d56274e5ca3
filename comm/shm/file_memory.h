#pragma once
// Owners of file descriptors and mappings. System errors become exceptions.

#include <cstdint>
#include <string>
#include <utility>

#include "base/error.h"

namespace tessera {

/// Returns the error of the system call that has just failed.
CommError system_error(const std::string& what);

/// Closes a file on destruction.
class FileDescriptor {
 public:
  explicit FileDescriptor(int number = -1) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();

  /// Opens a growable file in memory, without a path. Throws CommError.
  static FileDescriptor in_memory(const std::string& label);
  /// Opens an in_memory() file of another process of this user. `path` may be untrusted. Throws a CommError that begins
  /// with `what`, `path` and the reason, without opening any other file.
  static FileDescriptor open_own(const std::string& what, const std::string& path);

  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  /// Returns the path for other processes of this user and pid namespace.
  std::string path() const;
  void resize(int64_t bytes);  // throws CommError
  int64_t size() const;

 private:
  int number_;
};

/// Unmaps memory on destruction.
class FileMapping {
 public:
  enum class Access { Read, ReadWrite };

  FileMapping() = default;
  /// Maps shared memory. `offset` is a multiple of the system's page size. Throws CommError.
  FileMapping(const FileDescriptor& file, int64_t offset, int64_t bytes, Access access = Access::ReadWrite);
  FileMapping(FileMapping&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  FileMapping& operator=(FileMapping&& other) noexcept;
  ~FileMapping();

  char* base() const { return base_; }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace tessera
