#include "comm/shm/shm_arena.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
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

// All memory is initially zero, which is also the initial value of the atomics.
ShmArena::ShmArena(ShmLayout layout, const FileDescriptor& file, int64_t offset)
    : layout_(layout), memory_(file, offset, layout.total_bytes()) {}

ShmArena ShmArena::create(ShmLayout layout) {
  static_assert(sizeof(Failure) == ShmLayout::kFailureBytes);
  FileDescriptor file = FileDescriptor::in_memory("arena");
  file.resize(layout.file_bytes());
  ShmArena arena(layout, file, 0);
  arena.file_ = std::move(file);
  return arena;
}

ShmArena ShmArena::attach(ShmLayout layout, const std::string& address) {
  FileDescriptor file = FileDescriptor::open_own("opening rank 0's shared memory", address);
  if (file.size() != layout.file_bytes()) {
    throw CommError(fmt::format("{} is not the group's shared memory of {} bytes", address, layout.file_bytes()));
  }
  ShmArena arena(layout, file, 0);
  arena.file_ = std::move(file);
  return arena;
}

ShmArena ShmArena::messages(int from, int to) const {
  return ShmArena(ShmLayout::of_messages(), file_, layout_.messages_offset(from, to));
}

RankControl& ShmArena::control(int rank) const {
  return *reinterpret_cast<RankControl*>(base() + layout_.control_offset(rank));
}

void ShmArena::fail(const std::string& reason) {
  auto& failure = *reinterpret_cast<Failure*>(base());
  uint32_t none = Failure::kNone;
  if (!failure.state.compare_exchange_strong(none, Failure::kBeingWritten)) {
    return;
  }
  failure.size = static_cast<uint32_t>(std::min(reason.size(), sizeof(failure.text)));
  std::memcpy(failure.text, reason.data(), failure.size);
  failure.state.store(Failure::kWritten);
}

std::string ShmArena::failure() const {
  const auto& failure = *reinterpret_cast<const Failure*>(base());
  return failure.state.load() == Failure::kWritten ? std::string(failure.text, failure.size) : "";
}

bool ShmArena::has_failed() const {
  return reinterpret_cast<const Failure*>(base())->state.load() != Failure::kNone;
}

void ShmArena::wake(int rank, uint32_t bits) const {
  RankControl& peer = control(rank);
  if ((peer.awaits.load(std::memory_order_relaxed) & bits) != 0) {
    peer.futex.fetch_add(1);
    syscall(SYS_futex, &peer.futex, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void ShmArena::sleep(int rank, uint32_t seen, std::chrono::milliseconds limit) const {
  const timespec time = {.tv_sec = limit.count() / 1000, .tv_nsec = limit.count() % 1000 * 1000000};
  syscall(SYS_futex, &control(rank).futex, FUTEX_WAIT, seen, &time, nullptr, 0);
}

}  // namespace tessera
