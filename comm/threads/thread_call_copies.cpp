#include "comm/threads/thread_call_copies.h"

#include "base/error.h"

namespace tessera {

namespace {

std::vector<ElementCopy> all_gather_copies(c10::ArrayRef<CollectiveCall> calls) {
  const int64_t count = calls[0].input.numel();
  std::vector<ElementCopy> copies;
  for (size_t to = 0; to < calls.size(); ++to) {
    for (size_t from = 0; from < calls.size(); ++from) {
      copies.push_back({.from = from, .to = to, .to_begin = static_cast<int64_t>(from) * count, .count = count});
    }
  }
  return copies;
}

std::vector<ElementCopy> broadcast_copies(c10::ArrayRef<CollectiveCall> calls) {
  const auto root = static_cast<size_t>(calls[0].root);
  std::vector<ElementCopy> copies;
  for (size_t to = 0; to < calls.size(); ++to) {
    if (to != root) {
      copies.push_back({.from = root, .to = to, .count = calls[root].output.numel()});
    }
  }
  return copies;
}

std::vector<ElementCopy> all_to_all_copies(c10::ArrayRef<CollectiveCall> calls) {
  std::vector<int64_t> sent(calls.size(), 0);
  std::vector<ElementCopy> copies;
  for (size_t to = 0; to < calls.size(); ++to) {
    int64_t received = 0;
    for (size_t from = 0; from < calls.size(); ++from) {
      const int64_t count = calls[from].input_splits[to];
      copies.push_back({.from = from, .from_begin = sent[from], .to = to, .to_begin = received, .count = count});
      received += count;
      sent[from] += count;
    }
  }
  return copies;
}

}  // namespace

std::vector<ElementCopy> plan_copies(c10::ArrayRef<CollectiveCall> calls) {
  switch (calls[0].kind) {
    case Collective::AllGather:
      return all_gather_copies(calls);
    case Collective::Broadcast:
      return broadcast_copies(calls);
    case Collective::AllToAll:
      return all_to_all_copies(calls);
    case Collective::Send:
      return {{.from = 0, .to = 1, .count = calls[0].input.numel()}};
    case Collective::ReduceScatter:
    case Collective::AllReduce:
    case Collective::Barrier:
    case Collective::Scatter:
    case Collective::Gather:
    case Collective::Recv:
      break;
  }
  TESSERA_ASSERT(false, "{} is more than copies", name(calls[0].kind));
}

const at::Tensor& sent_tensor(const CollectiveCall& call) {
  return call.kind == Collective::Broadcast ? call.output : call.input;
}

}  // namespace tessera
