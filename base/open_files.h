#pragma once
// Precautions for opening and growing files. Thread safety: any thread.

#include <cstdint>
#include <map>
#include <string>

namespace tessera {

/// Moves a descriptor above stdin, stdout and stderr: if these are closed, the program's output would go to the file.
/// Returns the new number, or -1 with errno set, also if `descriptor` is -1.
int above_standard(int descriptor);

/// Returns why a file of this process may not have `bytes`, or "". Exceeding the limit (ulimit -f) would end the
/// process.
std::string past_size_limit(uint64_t bytes);

/// Returns what each open descriptor refers to, such as "socket:[4711]". Empty if /proc cannot be read.
std::map<int, std::string> open_files();

/// Returns descriptors that were opened, or replaced, since open_files() returned `before`.
std::map<int, std::string> opened_since(const std::map<int, std::string>& before);

/// Sets FD_CLOEXEC on network sockets that any thread opened during its lifetime. This includes the epoll descriptors
/// and nonblocking pipes of their event loops. For foreign code that does not do so: child processes would keep the
/// sockets open, and peers would not notice this process's end.
class CloseOnExecScope {
 public:
  CloseOnExecScope() : before_(open_files()) {}
  ~CloseOnExecScope();
  CloseOnExecScope(const CloseOnExecScope&) = delete;
  CloseOnExecScope& operator=(const CloseOnExecScope&) = delete;

 private:
  const std::map<int, std::string> before_;
};

}  // namespace tessera
