#pragma once
// Owners of a file's number and of a part of a file in memory. The system calls' errors as exceptions, no more.

#include <cstdint>
#include <string>
#include <utility>

#include "base/error.h"

namespace tessera {

/// What the system says of the call that has just failed.
CommError system_error(const std::string& what);

/// Closes a file.
class FileDescriptor {
 public:
  explicit FileDescriptor(int number = -1) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();

  /// A file in memory, without a name; it grows as it is asked to. Throws CommError.
  static FileDescriptor in_memory(const char* label);
  /// A regular file, or one in memory, of this process's user: `path` may come from a peer. Throws CommError, which
  /// begins with `what`, `path` and the reason.
  static FileDescriptor open_own(const std::string& what, const std::string& path);

  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  /// The way to it for other processes of this user and pid namespace.
  std::string path() const;
  /// Throws CommError.
  void resize(int64_t bytes);
  int64_t size() const;

 private:
  int number_;
};

/// Unmaps memory.
class FileMapping {
 public:
  enum class Access { Read, ReadWrite };

  FileMapping() = default;
  /// Shared by all who map it. `offset`: a multiple of the system's page. Throws CommError.
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
