#pragma once
// Where autograd's gradients lie. Where the ranks of a unit's group read each other's shared memory ("shm"), a gradient
// that lies there needs no copy to be reduced: the peers add it up from where it is (comm/shm/shared_memory.h).
//
// Autograd allocates gradients by itself. So from the first unit whose shards lie in shared memory on, an allocator
// stands before libtorch's for the CPU. In a thread whose backward runs it serves what is as large as one of
// the units' gradients, and hands all else on, as it does in other threads, outside of backward and in a backward
// within a backward. A tensor that is as large by chance is served too, which makes no difference to it but for fork():
// the child shares it with its parent. A gradient that comes from elsewhere is copied, as ever. An allocator that the
// program sets later takes its place.

#include <cstddef>
#include <vector>

namespace tessera {

/// Thread safety: begin() and end() are for the thread that runs the rank's backward.
class SharedGradientAllocator {
 public:
  /// `bytes`: the sizes of the gradients, in any order. Of more than kMostSizes different ones the largest count. None:
  /// there is nothing to do.
  explicit SharedGradientAllocator(std::vector<size_t> bytes = {});
  SharedGradientAllocator(const SharedGradientAllocator&) = delete;
  SharedGradientAllocator& operator=(const SharedGradientAllocator&) = delete;
  /// Memory that is free goes back to the system.
  ~SharedGradientAllocator();

  /// Sets the allocator, once a process, before the first begin(). Called where a model is sharded, which is before
  /// threads of its loaders run: libtorch reads which allocator it has without a lock.
  static void prepare();

  /// Called in a backward. From here to end(), or to the end of the backward, tensors of these sizes that this thread
  /// makes lie in shared memory.
  void begin() const;
  void end() const;

  static constexpr size_t kMostSizes = 64;

 private:
  std::vector<size_t> bytes_;  // sorted, each once
};

}  // namespace tessera
