#include "comm/threads/thread_call.h"

#include <cstring>

#include "base/error.h"
#include "comm/backend/local_reduce.h"
#include "comm/backend/stream_copy.h"
#include "comm/threads/thread_call_copies.h"
#include "comm/threads/thread_call_tensors.h"

namespace tessera {

namespace {

struct Bytes {
  char* data;
  size_t size;
};

// Returns elements [begin, begin + count) of a contiguous tensor as raw bytes, because no version may change.
Bytes element_bytes(const at::Tensor& tensor, int64_t begin, int64_t count) {
  const size_t item = tensor.element_size();
  char* data = static_cast<char*>(tensor.mutable_data_ptr());
  return {data == nullptr ? nullptr : data + begin * item, count * item};
}

void copy(Bytes to, Bytes from) {
  TESSERA_ASSERT(to.size == from.size, "{} bytes into {}", from.size, to.size);
  if (to.size != 0 && to.data != from.data) {
    std::memcpy(to.data, from.data, to.size);
  }
}

Bytes whole(const at::Tensor& tensor) {
  return element_bytes(tensor, 0, tensor.numel());
}

struct Elements {
  int64_t begin;
  int64_t count;
};

/// Returns the range of rank `rank`'s elements, where each rank has as many as `flat`.
PartRange elements_range(const at::Tensor& flat, size_t rank, Elements elements) {
  const auto item = static_cast<int64_t>(flat.element_size());
  return {.dtype = flat.scalar_type(),
          .rank = static_cast<int64_t>(rank),
          .begin = elements.begin * item,
          .bytes = elements.count * item};
}

/// Returns elements [begin, begin + count) of the data that `call` sends to rank `to`: in place, or copied to `room`.
const void* sent_elements(const CollectiveCall& call, size_t to, Elements elements, std::vector<char>& room) {
  if (!call.parts) {
    const auto first = static_cast<int64_t>(to) * call.output.numel() + elements.begin;
    return element_bytes(call.input, first, elements.count).data;
  }
  const PartRange range = elements_range(call.output, to, elements);
  if (const char* const found = find_in_parts(*call.parts, range).data) {
    return found;
  }
  room.resize(static_cast<size_t>(range.bytes));
  read_segments(*call.parts, range, room.data(), kNeverStream);
  return room.data();
}

/// Splits each rank's elements at segment boundaries, so that most pieces are in one tensor.
std::vector<Elements> split_at_segments(const CollectiveCall& call) {
  const int64_t count = call.output.numel();
  std::vector<Elements> pieces;
  int64_t done = 0;
  if (call.parts) {
    for (const auto& part : *call.parts) {
      pieces.push_back({done, part.offset - done});
      pieces.push_back({part.offset, part.numel});
      done = part.offset + part.numel;
    }
  }
  pieces.push_back({done, count - done});
  std::erase_if(pieces, [](const Elements& piece) { return piece.count == 0; });
  return pieces;
}

void reduce_scatter_in_memory(c10::ArrayRef<CollectiveCall> calls) {
  const auto pieces = split_at_segments(calls[0]);
  std::vector<std::vector<char>> rooms(calls.size());
  std::vector<const void*> sent(calls.size());
  for (size_t to = 0; to < calls.size(); ++to) {
    const at::Tensor& output = calls[to].output;
    for (const Elements& piece : pieces) {
      for (size_t from = 0; from < calls.size(); ++from) {
        sent[from] = sent_elements(calls[from], to, piece, rooms[from]);
      }
      reduce_in_order(element_bytes(output, piece.begin, piece.count).data, sent, piece.count, output.scalar_type(),
                      calls[0].op);
    }
  }
}

void all_reduce_in_memory(c10::ArrayRef<CollectiveCall> calls) {
  const at::Tensor& result = calls[0].output;
  std::vector<const void*> inputs;
  for (const CollectiveCall& call : calls) {
    inputs.push_back(whole(call.output).data);
  }
  reduce_in_order(whole(result).data, inputs, result.numel(), result.scalar_type(), calls[0].op);
  for (const CollectiveCall& call : calls.slice(1)) {
    copy(whole(call.output), whole(result));
  }
}

void copy_in_memory(c10::ArrayRef<CollectiveCall> calls) {
  for (const ElementCopy& piece : plan_copies(calls)) {
    const CollectiveCall& to = calls[piece.to];
    const at::Tensor& from = sent_tensor(calls[piece.from]);
    const Bytes sent = element_bytes(from, piece.from_begin, piece.count);
    if (to.parts) {  // of an all-gather
      write_segments(*to.parts, elements_range(from, piece.from, {0, piece.count}), sent.data, kNeverStream);
    } else {
      copy(element_bytes(to.output, piece.to_begin, piece.count), sent);
    }
  }
}

void execute_in_memory(c10::ArrayRef<CollectiveCall> calls) {
  switch (calls[0].kind) {
    case Collective::AllGather:
    case Collective::Broadcast:
    case Collective::AllToAll:
    case Collective::Send:
      return copy_in_memory(calls);
    case Collective::ReduceScatter:
      return reduce_scatter_in_memory(calls);
    case Collective::AllReduce:
      return all_reduce_in_memory(calls);
    case Collective::Barrier:
      return;
    case Collective::Scatter:
    case Collective::Gather:
    case Collective::Recv:
      break;
  }
  TESSERA_ASSERT(false, "{} is not a call of this backend", name(calls[0].kind));
}

}  // namespace

void execute(c10::ArrayRef<CollectiveCall> calls) {
  call_device(calls[0]).is_cpu() ? execute_in_memory(calls) : execute_by_tensor_ops(calls);
}

}  // namespace tessera
