#pragma once
// SharedGradientAllocator: lets autograd's gradients lie in shared memory, where peers ("shm") reduce them in place.
//
// Autograd allocates gradients by itself. So from the first unit with shards in shared memory on, an allocator stands
// before libtorch's for the CPU. In a thread whose backward runs it serves what is as large as one of the units'
// gradients, and hands all else on. A tensor of that size by chance is served too, and a forked child shares it with
// its parent. A gradient from elsewhere is copied. An allocator that the program sets later takes its place.

#include <cstddef>
#include <vector>

namespace tessera {

/// Thread safety: begin() and end() are for the thread that runs the rank's backward.
class SharedGradientAllocator {
 public:
  /// `bytes`: the sizes of the gradients; beyond kMostSizes different ones the largest count.
  explicit SharedGradientAllocator(std::vector<size_t> bytes = {});
  SharedGradientAllocator(const SharedGradientAllocator&) = delete;
  SharedGradientAllocator& operator=(const SharedGradientAllocator&) = delete;
  ~SharedGradientAllocator();

  /// Sets the allocator, once a process, where a model is sharded: before loaders run, which read it without a lock.
  static void prepare();

  /// Serves tensors of these sizes that this thread makes, from here to end() or the end of the backward.
  void begin() const;
  void end() const;

  static constexpr size_t kMostSizes = 64;

 private:
  std::vector<size_t> bytes_;  // sorted, each once
};

}  // namespace tessera
