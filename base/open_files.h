#pragma once
// What a process has to see to itself when it opens and grows files. Thread safety: any thread.

#include <cstdint>
#include <map>
#include <string>

namespace tessera {

/// The open file `descriptor`, or -1, under a number that is none of stdin, stdout and stderr: where those are closed,
/// what the program prints would go to the file. Closes the number that it had. -1, with errno, on failure.
int above_standard(int descriptor);

/// Why a file of this process may not have `bytes`; "" where it may. What is past the limit (ulimit -f) would end the
/// process by a signal.
std::string past_size_limit(uint64_t bytes);

/// The open files of this process: what each number stands for, "socket:[4711]" say. None where /proc cannot be read.
std::map<int, std::string> open_files();

/// Returns those that are open now, and were not, or stood for something else, when open_files() gave `before`.
std::map<int, std::string> opened_since(const std::map<int, std::string>& before);

/// For code of others that opens sockets without FD_CLOEXEC: a program that this one starts would keep them open, and a
/// peer would not see this process's end. Gives FD_CLOEXEC to the network sockets, and to what their event loops use
/// (epoll, pipes that do not block), that came while it lived, by whatever thread, and are open at its end.
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
