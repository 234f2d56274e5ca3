#pragma once
// Memory that the ranks of an "shm" group share, and wake-ups between ranks: system calls, without a protocol.
//
// The memory is a memfd, which has no name and disappears with the last process that has it open or mapped. Rank 0
// makes it; others open it through /proc/<pid>/fd, which requires the same user and pid namespace. Every rank keeps it
// open, to map the memory of messages on demand.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "comm/shm/file_memory.h"
#include "comm/shm/shm_layout.h"

namespace tessera {

/// State that a rank publishes to its peers. Steps are counted from the group's beginning.
struct RankControl {
  /// Numbers of steps for which this rank has filled its slots (`posted`) and no longer needs them (`consumed`).
  alignas(128) std::atomic<uint64_t> posted;
  alignas(128) std::atomic<uint64_t> consumed;
  /// Futex on which this rank sleeps. Peers increment it, unless `awaits` is 0.
  alignas(128) std::atomic<uint32_t> futex;
  std::atomic<uint32_t> awaits;
  /// Nonzero once the rank's end of the group is destroyed.
  alignas(128) std::atomic<uint32_t> left;
};
static_assert(sizeof(RankControl) <= ShmLayout::kControlBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

/// Bits of RankControl::awaits: waiting for peers' `posted` or `consumed` to grow.
constexpr uint32_t kAwaitsPosted = 1;
constexpr uint32_t kAwaitsConsumed = 2;

/// Shared memory of a group. Thread safety: any number of threads.
class ShmArena {
 public:
  /// Makes the memory. Throws CommError.
  static ShmArena create(ShmLayout layout);
  /// Opens the memory at another process's address().
  static ShmArena attach(ShmLayout layout, const std::string& address);

  /// Returns the address for attach() in other processes.
  std::string address() const { return file_.path(); }
  /// Maps the memory of messages from one rank to another, anew in each call. The two are ranks 0 and 1 there. Throws
  /// CommError.
  ShmArena messages(int from, int to) const;

  const ShmLayout& layout() const { return layout_; }
  RankControl& control(int rank) const;
  /// Returns the slot of `rank` for `step`, or its payload.
  char* slot(int rank, uint64_t step) const { return base() + layout_.slot_offset(rank, step); }
  char* payload(int rank, uint64_t step) const { return slot(rank, step) + layout_.header_bytes(); }

  /// Records why the group failed. Keeps the first reason, truncated if too long. failure() is "" without a reason, or
  /// while a rank is writing one, for which has_failed() is already true.
  void fail(const std::string& reason);
  std::string failure() const;
  bool has_failed() const;

  /// Wakes `rank` if it awaits any of `bits`. The change must have been stored before.
  void wake(int rank, uint32_t bits) const;
  /// Sleeps until `rank`'s futex differs from `seen`, at most for `limit`. May return early.
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
