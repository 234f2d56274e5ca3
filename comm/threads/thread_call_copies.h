#pragma once
// Elements that a collective of threads moves unchanged: integers only, for copies of memory (thread_call.cpp) and by
// tensor operations (thread_call_tensors.cpp).

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/backend/collective_call.h"

namespace tessera {

/// Copies `count` elements from the tensor that rank `from` sends to the one that rank `to` receives into.
struct ElementCopy {
  size_t from = 0;
  int64_t from_begin = 0;
  size_t to = 0;
  int64_t to_begin = 0;
  int64_t count = 0;
};

/// Returns the copies of an all-gather, broadcast, all-to-all, or message (the sender's call, then the receiver's).
std::vector<ElementCopy> plan_copies(c10::ArrayRef<CollectiveCall> calls);

/// Returns the tensor that a call sends from: a broadcast's only one.
const at::Tensor& sent_tensor(const CollectiveCall& call);

}  // namespace tessera
