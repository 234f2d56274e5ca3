#include "base/open_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>

namespace tessera {

int above_standard(int descriptor) {
  if (descriptor < 0 || descriptor > STDERR_FILENO) {
    return descriptor;
  }
  const int moved = fcntl(descriptor, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int reason = errno;
  close(descriptor);
  errno = reason;
  return moved;
}

std::string past_size_limit(uint64_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || bytes <= limit.rlim_cur) {
    return {};
  }
  return fmt::format("files of this process may have {} bytes (ulimit -f), and {} are needed", limit.rlim_cur, bytes);
}

}  // namespace tessera
