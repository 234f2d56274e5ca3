#include "data/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <random>
#include <system_error>

#include "base/error.h"

namespace tessera::data {

namespace {

std::string why(int error) {
  return std::generic_category().message(error);
}

struct Descriptor {
  explicit Descriptor(const std::string& path) : number(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    TESSERA_CHECK(ValueError, number >= 0, "{}: cannot be opened: {}", path, why(errno));
  }
  ~Descriptor() { close(number); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number;
};

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const Descriptor file(path);
  struct stat status = {};
  TESSERA_CHECK(ValueError, fstat(file.number, &status) == 0, "{}: cannot be read: {}", path, why(errno));
  TESSERA_CHECK(ValueError, S_ISREG(status.st_mode), "{}: is not a file", path);
  size_ = static_cast<size_t>(status.st_size);
  if (size_ > 0) {
    data_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.number, 0);
    TESSERA_CHECK(ValueError, data_ != MAP_FAILED, "{}: cannot be mapped: {}", path, why(errno));
  }
}

MappedFile::~MappedFile() {
  if (data_) {
    munmap(data_, size_);
  }
}

std::string unfinished_name(const std::string& path) {
  // A process id would not be unique: ranks are threads, or processes of hosts that share a file system.
  std::random_device draws;
  return fmt::format("{}.{:08x}{:08x}.unfinished", path, draws(), draws());
}

}  // namespace tessera::data
