#include "base/open_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <filesystem>
#include <system_error>

namespace tessera {

namespace {

bool belongs_to_network(int descriptor, const std::string& what) {
  if (what.starts_with("socket:")) {
    int family = 0;
    socklen_t length = sizeof family;
    return getsockopt(descriptor, SOL_SOCKET, SO_DOMAIN, &family, &length) == 0 &&
           (family == AF_INET || family == AF_INET6);
  }
  return what == "anon_inode:[eventpoll]" ||
         (what.starts_with("pipe:") && (fcntl(descriptor, F_GETFL) & O_NONBLOCK) != 0);
}

}  // namespace

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

std::map<int, std::string> open_files() {
  std::map<int, std::string> files;
  std::error_code error;
  std::filesystem::directory_iterator entry("/proc/self/fd", error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    int number = -1;
    std::from_chars(name.data(), name.data() + name.size(), number);
    std::error_code gone;  // such as the folder's own
    std::string what = std::filesystem::read_symlink(entry->path(), gone).string();
    if (!gone) {
      files.emplace(number, std::move(what));
    }
  }
  return files;
}

std::map<int, std::string> opened_since(const std::map<int, std::string>& before) {
  auto files = open_files();
  std::erase_if(files, [&](const auto& file) {
    const auto found = before.find(file.first);
    return found != before.end() && found->second == file.second;
  });
  return files;
}

CloseOnExecScope::~CloseOnExecScope() {
  for (const auto& [number, what] : opened_since(before_)) {
    if (belongs_to_network(number, what)) {
      fcntl(number, F_SETFD, FD_CLOEXEC);
    }
  }
}

}  // namespace tessera
