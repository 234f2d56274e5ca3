#pragma once
// A column-wise linear layer on shards of a sequence that multiplies while its collectives are under way.
//
// x [positions, in] Shard(0), W [out, in] Shard(0), on rank 1 of 3:
//
//   forward    all-gather of x starts; rows of rank 1 of y = x W^T; wait; rows of ranks 0 and 2
//   backward   g W; its reduce-scatter starts; g^T x; wait
//
// Each is one collective as without overlap, of the same bytes, or half of them under autocast, which casts x before it
// is gathered. The gathered x is kept for backward, as it is without. Results are those without overlap up to rounding:
// y and the gradient of x are the same sums; the gradients of W and of the bias add the rows of a batch by position.
//
// After fused_all_gather_matmul in torch/distributed/_symmetric_memory, which gathers in chunks instead, and V.
// Korthikanti et al.: Reducing Activation Recomputation in Large Transformer Models, 2022.

namespace tessera {

/// While one lives, products of the calling thread do so: matmul and addmm of a DTensor that one axis cuts along a dim
/// but its last, by a matrix that is Shard(1) on the same mesh (W^T). Others are as ever. Scopes nest.
/// Thread safety: for the thread that made it.
class OverlapScope {
 public:
  OverlapScope();
  ~OverlapScope();
  OverlapScope(const OverlapScope&) = delete;
  OverlapScope& operator=(const OverlapScope&) = delete;

 private:
  bool previous_;
};

}  // namespace tessera
