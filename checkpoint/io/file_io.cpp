#include "checkpoint/io/file_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/open_files.h"
#include "checkpoint/format/checkpoint_error.h"

namespace tessera::dcp {

namespace {

// A shorter run is read along with the gap before the next one, because seeking costs more.
constexpr int64_t kShortRunBytes = 16 << 10;
// Limit for such a read.
constexpr int64_t kSpanBytes = 4 << 20;
// Smallest gap that is worth a seek.
constexpr int64_t kLongGapBytes = 64 << 10;

[[noreturn]] void fail(const std::string& path, const char* what) {
  const int reason = errno;
  throw CheckpointError(fmt::format("{}: cannot {}: {}", path, what, std::strerror(reason)));
}

void check_size(const std::string& path, uint64_t bytes, const char* what) {
  const std::string fault = past_size_limit(bytes);
  TESSERA_CHECK(CheckpointError, fault.empty(), "{}: cannot {}: {}", path, what, fault);
}

/// Runs of a slice, merged into spans of the file that are worth one read.
struct Span {
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<Run> runs;
};

void read_span(const File& file, const TensorBytes& tensor, const Span& span, char* data) {
  const int64_t item = tensor.item_bytes;
  const uint64_t offset = tensor.offset + static_cast<uint64_t>(span.begin * item);
  const auto bytes = static_cast<uint64_t>((span.end - span.begin) * item);
  if (span.runs.size() == 1) {
    file.read(data + span.runs[0].in_slice * item, bytes, offset);
    return;
  }
  std::vector<char> buffer(bytes);
  file.read(buffer.data(), bytes, offset);
  for (const Run& run : span.runs) {
    std::memcpy(data + run.in_slice * item, buffer.data() + (run.in_tensor - span.begin) * item,
                static_cast<size_t>(run.numel * item));
  }
}

}  // namespace

File::File(std::string path, int flags) : path_(std::move(path)) {
  do {
    descriptor_ = ::open(path_.c_str(), flags | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && errno == EINTR);
  if (descriptor_ < 0) {
    fail(path_, flags & O_CREAT ? "be created" : "be opened");
  }
}

// Opening a pipe would wait for a writer. The flag has no effect on a regular file.
File File::open(const std::string& path) {
  File file(path, O_RDONLY | O_NONBLOCK);
  file.size();  // throws unless it is a regular file
  return file;
}

// Avoids O_RDWR when ranks of several hosts write to one file: NFS reads a partially written page if the file is open
// for reading too, and may then write back the whole page over another host's adjacent data.
File File::create(const std::string& path, uint64_t bytes) {
  check_size(path, bytes, "get its size");
  File file(path, O_WRONLY | O_CREAT | O_EXCL);
  if (::ftruncate(file.descriptor_, static_cast<off_t>(bytes)) != 0) {
    fail(path, "get its size");
  }
  return file;
}

File File::open_to_write(const std::string& path) {
  return File(path, O_WRONLY);
}

File::~File() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

uint64_t File::size() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) {
    fail(path_, "tell its size");
  }
  if (!S_ISREG(status.st_mode)) {
    throw CheckpointError(fmt::format("{}: is no regular file", path_));
  }
  return static_cast<uint64_t>(status.st_size);
}

void File::read(void* data, uint64_t bytes, uint64_t offset) const {
  auto* target = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t count = ::pread(descriptor_, target, bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      fail(path_, "be read");
    }
    TESSERA_CHECK(CheckpointError, count > 0, "{}: ends at byte {}, {} bytes too early; it is truncated", path_, offset,
                  bytes);
    target += count;
    offset += static_cast<uint64_t>(count);
    bytes -= static_cast<uint64_t>(count);
  }
}

void File::write(const void* data, uint64_t bytes, uint64_t offset) const {
  check_size(path_, offset + bytes, "be written");
  const auto* source = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t count = ::pwrite(descriptor_, source, bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      fail(path_, "be written");
    }
    source += count;
    offset += static_cast<uint64_t>(count);
    bytes -= static_cast<uint64_t>(count);
  }
}

void File::sync() const {
  if (::fsync(descriptor_) != 0) {
    fail(path_, "be synced to the disk");
  }
}

void File::begin_sync(uint64_t bytes, uint64_t offset) const noexcept {
  ::sync_file_range(descriptor_, static_cast<off64_t>(offset), static_cast<off64_t>(bytes), SYNC_FILE_RANGE_WRITE);
}

void write_slice(const File& file, const TensorBytes& tensor, const ShardSlice& slice, const void* data) {
  const int64_t item = tensor.item_bytes;
  for_each_run(slice, tensor.sizes, [&](const Run& run) {
    file.write(static_cast<const char*>(data) + run.in_slice * item, static_cast<uint64_t>(run.numel * item),
               tensor.offset + static_cast<uint64_t>(run.in_tensor * item));
  });
}

void read_slice(const File& file, const TensorBytes& tensor, const ShardSlice& slice, void* data) {
  const int64_t item = tensor.item_bytes;
  Span span;
  const auto flush = [&] {
    if (!span.runs.empty()) {
      read_span(file, tensor, span, static_cast<char*>(data));
    }
    span = Span();
  };
  for_each_run(slice, tensor.sizes, [&](const Run& run) {
    const int64_t end = run.in_tensor + run.numel;
    if (run.numel * item >= kShortRunBytes || (end - span.begin) * item > kSpanBytes ||
        (run.in_tensor - span.end) * item > kLongGapBytes) {
      flush();
    }
    if (span.runs.empty()) {
      span.begin = run.in_tensor;
    }
    span.end = end;
    span.runs.push_back(run);
  });
  flush();
}

std::string read_text(const std::string& path, uint64_t max_bytes) {
  const File file = File::open(path);
  const uint64_t bytes = file.size();
  TESSERA_CHECK(CheckpointError, bytes <= max_bytes, "{}: {} bytes, of at most {}", path, bytes, max_bytes);
  std::string text(bytes, '\0');
  file.read(text.data(), bytes, 0);
  return text;
}

void write_text(const std::string& path, std::string_view text) {
  const File file = File::create(path, 0);
  file.write(text.data(), text.size(), 0);
  file.sync();
}

void sync_folder(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) {
    fail(folder, "be opened");
  }
  const int result = ::fsync(descriptor);
  const int reason = errno;
  ::close(descriptor);
  // Some file systems cannot sync a folder, and report that.
  if (result != 0 && reason != EINVAL) {
    errno = reason;
    fail(folder, "be synced to the disk");
  }
}

void make_folder(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> made;
  for (auto above = parent_folder(folder); !std::filesystem::exists(above, error); above = parent_folder(above)) {
    made.push_back(above);
  }
  std::filesystem::create_directories(parent_folder(folder), error);
  TESSERA_CHECK(CheckpointError, !error, "{}: cannot be made: {}", parent_folder(folder), error.message());
  for (const auto& above : made) {
    sync_folder(parent_folder(above));
  }
  if (::mkdir(folder.c_str(), 0777) != 0) {
    fail(folder, "be made");
  }
}

void rename_durably(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail(to, fmt::format("get its name (from {})", from).c_str());
  }
  sync_folder(parent_folder(to));
}

std::string parent_folder(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace tessera::dcp
