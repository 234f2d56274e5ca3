#pragma once
// The memory that the ranks of an "shm" group share, and how one rank wakes another: the system calls, no protocol.
//
// The memory is a memfd: it has no name in any file system, and is gone with the last process that has it open or
// mapped, however those end. Rank 0 makes it; the others open it through /proc/<pid>/fd, which asks for the same user
// and pid namespace. Every rank keeps it open, to map the memory of messages when it needs it.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "comm/shm/file_memory.h"
#include "comm/shm/shm_layout.h"

namespace tessera {

/// What a rank tells its peers. Steps are counted from the group's beginning.
struct RankControl {
  /// Steps whose slots this rank has filled, and of whose slots it has no more need.
  alignas(128) std::atomic<uint64_t> posted;
  alignas(128) std::atomic<uint64_t> consumed;
  /// The futex on which this rank sleeps; peers count it up. They need not where `awaits` is 0.
  alignas(128) std::atomic<uint32_t> futex;
  std::atomic<uint32_t> awaits;
  /// Set when the rank's end of the group is destroyed.
  alignas(128) std::atomic<uint32_t> left;
};
static_assert(sizeof(RankControl) <= ShmLayout::kControlBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

/// Bits of RankControl::awaits: peers' `posted`, or `consumed`, to grow.
constexpr uint32_t kAwaitsPosted = 1;
constexpr uint32_t kAwaitsConsumed = 2;

/// Thread safety: any number of threads.
class ShmArena {
 public:
  /// Throws CommError with the reason.
  static ShmArena create(ShmLayout layout);
  /// `address` as another process's address() gave it.
  static ShmArena attach(ShmLayout layout, const std::string& address);

  /// For attach() in other processes.
  std::string address() const { return file_.path(); }
  /// The memory of messages from one rank to another, in which those are ranks 0 and 1. Every call maps it once more.
  /// Throws CommError.
  ShmArena messages(int from, int to) const;

  const ShmLayout& layout() const { return layout_; }
  RankControl& control(int rank) const;
  /// The slot of `rank` for `step`: its header, and its payload.
  char* slot(int rank, uint64_t step) const { return base() + layout_.slot_offset(rank, step); }
  char* payload(int rank, uint64_t step) const { return slot(rank, step) + layout_.header_bytes(); }

  /// Records why the group failed; the first reason is kept, and cut where it is too long. failure(): "" for none, or
  /// one that a rank is just writing, which has_failed() knows of already.
  void fail(const std::string& reason);
  std::string failure() const;
  bool has_failed() const;

  /// Wakes `rank` if it awaits any of `bits`. The change must have been stored before.
  void wake(int rank, uint32_t bits) const;
  /// Sleeps until `rank`'s futex differs from `seen`, or for `limit` at most; may return early.
  void sleep(int rank, uint32_t seen, std::chrono::milliseconds limit) const;

 private:
  struct Failure;

  ShmArena(ShmLayout layout, const FileDescriptor& file, int64_t offset);

  char* base() const { return memory_.base(); }

  ShmLayout layout_;
  FileDescriptor file_;  // none for memory of messages
  FileMapping memory_;
};

}  // namespace tessera
