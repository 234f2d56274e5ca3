#pragma once
// Gradients in shared memory, which the host's other ranks ("shm") reduce without a copy. An option:
//
//   enable_shared_gradients();  // at the start of main, before data loaders run
//   init_process_group();
//
// Autograd allocates gradients itself, so this replaces libtorch's CPU allocator. In a thread that runs a backward of
// fully_shard or replicate, the new allocator uses shared memory for sizes from 64 KiB on that match a gradient of the
// unit, and forwards other requests. Measured: a step of the GPT of width 768 and 8 layers takes 16 % less time on 2
// ranks, at width 256 as long as without.
//
// - Other tensors of such a size are shared too. A forked child shares them with its parent.
// - A gradient from elsewhere is copied, as all are without this option.
// - An allocator that the program sets later replaces this one.

#include <cstddef>
#include <vector>

namespace tessera {

/// Replaces this process's CPU allocator. Further calls do nothing. Has no effect if ranks do not share memory. Thread
/// safety: call before other threads allocate, since they read the allocator without a lock.
void enable_shared_gradients();

/// Sizes of a model's gradients, for which the enabled allocator uses shared memory.
/// Thread safety: begin() and end() are for the thread that runs the rank's backward.
class SharedGradientSizes {
 public:
  /// Takes sizes in bytes. Keeps the largest kMostSizes different ones.
  explicit SharedGradientSizes(std::vector<size_t> bytes = {});
  SharedGradientSizes(const SharedGradientSizes&) = delete;
  SharedGradientSizes& operator=(const SharedGradientSizes&) = delete;
  ~SharedGradientSizes();

  /// Uses shared memory for this thread's tensors of these sizes, until end() or the end of the backward.
  void begin() const;
  void end() const;

  static constexpr size_t kMostSizes = 64;

 private:
  std::vector<size_t> bytes_;  // sorted and unique
};

}  // namespace tessera
