#pragma once
// Which elements a collective of ranks that are threads moves unchanged: integers alone, for those who copy memory
// (thread_call.cpp) and those who copy by tensor operations (thread_call_tensors.cpp).

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/backend/collective_call.h"

namespace tessera {

/// `count` elements of the tensor that rank `from` sends, to the tensor that rank `to` receives into.
struct ElementCopy {
  size_t from = 0;
  int64_t from_begin = 0;
  size_t to = 0;
  int64_t to_begin = 0;
  int64_t count = 0;
};

/// Of an all-gather, a broadcast, an all-to-all, or a message (its sender's call, then its receiver's).
std::vector<ElementCopy> copies_of(c10::ArrayRef<CollectiveCall> calls);

/// The tensor that a call sends from: of a broadcast, its only one.
const at::Tensor& sent_tensor(const CollectiveCall& call);

}  // namespace tessera
