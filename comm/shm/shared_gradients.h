#pragma once
// Gradients in shared memory, where the other ranks of the host ("shm") reduce them without a copy. An option:
//
//   enable_shared_gradients();  // at the start of main, before data loaders run
//   init_process_group();
//
// Autograd allocates gradients by itself, so this replaces libtorch's CPU allocator. In a thread that runs a backward
// of fully_shard or replicate, the new one serves what is as large as one of the units' gradients, from 64 KiB on, and
// hands all else on. Measured: a step of the GPT of width 768 and 8 layers takes 16 % less time on 2 ranks, at width
// 256 as long as without.
//
// - A tensor of such a size by chance is shared too. A forked child shares it with its parent.
// - A gradient that comes from elsewhere is copied, as all are without this option.
// - An allocator that the program sets later takes its place.

#include <cstddef>
#include <vector>

namespace tessera {

/// Replaces this process's CPU allocator. Further calls do nothing. Without effect where ranks do not share memory.
/// Thread safety: before other threads allocate, since they read the allocator without a lock.
void enable_shared_gradients();

/// The sizes of a model's gradients, for which the enabled allocator uses shared memory.
/// Thread safety: begin() and end() are for the thread that runs the rank's backward.
class SharedGradientSizes {
 public:
  /// Takes sizes in bytes; beyond kMostSizes different ones the largest count.
  explicit SharedGradientSizes(std::vector<size_t> bytes = {});
  SharedGradientSizes(const SharedGradientSizes&) = delete;
  SharedGradientSizes& operator=(const SharedGradientSizes&) = delete;
  ~SharedGradientSizes();

  /// Serves tensors of these sizes that this thread makes, from here to end() or the end of the backward.
  void begin() const;
  void end() const;

  static constexpr size_t kMostSizes = 64;

 private:
  std::vector<size_t> bytes_;  // sorted, each once
};

}  // namespace tessera
