#include "comm/shm_arena.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace tessera {

struct ShmArena::Failure {
  enum State : uint32_t { kNone, kBeingWritten, kWritten };
  std::atomic<uint32_t> state;
  uint32_t size;
  char text[ShmLayout::kFailureBytes - 8];
};

namespace {

CommError system_error(const std::string& what) {
  return CommError(fmt::format("{}: {}", what, std::strerror(errno)));
}

}  // namespace

// All of the memory's contents are zero at first, which is also the atomics' first value.
ShmArena::ShmArena(ShmLayout layout, const File& file, int64_t offset) : layout_(layout) {
  void* const memory = mmap(nullptr, layout.total_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file.number(), offset);
  if (memory == MAP_FAILED) {
    throw system_error(fmt::format("mapping {} bytes of shared memory", layout.total_bytes()));
  }
  base_ = static_cast<char*>(memory);
}

ShmArena ShmArena::create(ShmLayout layout) {
  static_assert(sizeof(Failure) == ShmLayout::kFailureBytes);
  File file(memfd_create("tessera", MFD_CLOEXEC));
  if (file.number() < 0) {
    throw system_error("memfd_create");
  }
  if (ftruncate(file.number(), layout.file_bytes()) != 0) {
    throw system_error(fmt::format("{} bytes of shared memory", layout.file_bytes()));
  }
  ShmArena arena(layout, file, 0);
  arena.file_ = std::move(file);
  return arena;
}

ShmArena ShmArena::attach(ShmLayout layout, const std::string& address) {
  File file(open(address.c_str(), O_RDWR | O_CLOEXEC));
  if (file.number() < 0) {
    throw system_error(fmt::format("opening rank 0's shared memory {}", address));
  }
  struct stat status {};
  if (fstat(file.number(), &status) != 0 || status.st_size != layout.file_bytes()) {
    throw CommError(fmt::format("{} is not the group's shared memory of {} bytes", address, layout.file_bytes()));
  }
  ShmArena arena(layout, file, 0);
  arena.file_ = std::move(file);
  return arena;
}

ShmArena ShmArena::messages(int from, int to) const {
  return ShmArena(ShmLayout::of_messages(), file_, layout_.messages_offset(from, to));
}

ShmArena::File& ShmArena::File::operator=(File&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

ShmArena::File::~File() {
  if (number_ >= 0) {
    close(number_);
  }
}

ShmArena::ShmArena(ShmArena&& other) noexcept
    : layout_(other.layout_), file_(std::move(other.file_)), base_(std::exchange(other.base_, nullptr)) {}

ShmArena::~ShmArena() {
  if (base_ != nullptr) {
    munmap(base_, layout_.total_bytes());
  }
}

std::string ShmArena::address() const {
  return fmt::format("/proc/{}/fd/{}", getpid(), file_.number());
}

RankControl& ShmArena::control(int rank) const {
  return *reinterpret_cast<RankControl*>(base_ + layout_.control_offset(rank));
}

void ShmArena::fail(const std::string& reason) {
  auto& failure = *reinterpret_cast<Failure*>(base_);
  uint32_t none = Failure::kNone;
  if (!failure.state.compare_exchange_strong(none, Failure::kBeingWritten)) {
    return;
  }
  failure.size = static_cast<uint32_t>(std::min(reason.size(), sizeof(failure.text)));
  std::memcpy(failure.text, reason.data(), failure.size);
  failure.state.store(Failure::kWritten);
}

std::string ShmArena::failure() const {
  const auto& failure = *reinterpret_cast<const Failure*>(base_);
  return failure.state.load() == Failure::kWritten ? std::string(failure.text, failure.size) : "";
}

void ShmArena::wake(int rank, uint32_t bits) const {
  RankControl& peer = control(rank);
  if ((peer.awaits.load(std::memory_order_relaxed) & bits) != 0) {
    peer.bell.fetch_add(1);
    syscall(SYS_futex, &peer.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void ShmArena::sleep(int rank, uint32_t seen, std::chrono::milliseconds limit) const {
  const timespec time = {.tv_sec = limit.count() / 1000, .tv_nsec = limit.count() % 1000 * 1000000};
  syscall(SYS_futex, &control(rank).bell, FUTEX_WAIT, seen, &time, nullptr, 0);
}

}  // namespace tessera
