#include "comm/thread_call.h"

#include <cstring>

#include "base/error.h"
#include "comm/local_reduce.h"

namespace tessera {

namespace {

struct Bytes {
  char* data;
  size_t size;
};

// Elements [begin, begin + count) of a contiguous tensor. Raw pointers: no version counter may change.
Bytes bytes_of(const at::Tensor& tensor, int64_t begin, int64_t count) {
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
  return bytes_of(tensor, 0, tensor.numel());
}

void all_gather(c10::ArrayRef<LocalCall> calls) {
  const int64_t count = calls[0].input.numel();
  for (const LocalCall& to : calls) {
    for (size_t from = 0; from < calls.size(); ++from) {
      copy(bytes_of(to.output, from * count, count), whole(calls[from].input));
    }
  }
}

void reduce_scatter(c10::ArrayRef<LocalCall> calls) {
  const at::Tensor& first = calls[0].output;
  std::vector<const void*> parts(calls.size());
  for (size_t to = 0; to < calls.size(); ++to) {
    for (size_t from = 0; from < calls.size(); ++from) {
      parts[from] = bytes_of(calls[from].input, to * first.numel(), first.numel()).data;
    }
    reduce_in_order(whole(calls[to].output).data, parts, first.numel(), first.scalar_type(), calls[0].op);
  }
}

void all_reduce(c10::ArrayRef<LocalCall> calls) {
  const at::Tensor& result = calls[0].output;
  std::vector<const void*> inputs;
  for (const LocalCall& call : calls) {
    inputs.push_back(whole(call.output).data);
  }
  reduce_in_order(whole(result).data, inputs, result.numel(), result.scalar_type(), calls[0].op);
  for (const LocalCall& call : calls.slice(1)) {
    copy(whole(call.output), whole(result));
  }
}

void broadcast(c10::ArrayRef<LocalCall> calls) {
  for (const LocalCall& call : calls) {
    copy(whole(call.output), whole(calls[call.root].output));
  }
}

void all_to_all(c10::ArrayRef<LocalCall> calls) {
  std::vector<int64_t> sent(calls.size(), 0);
  for (size_t to = 0; to < calls.size(); ++to) {
    int64_t received = 0;
    for (size_t from = 0; from < calls.size(); ++from) {
      const int64_t count = calls[from].input_splits[to];
      copy(bytes_of(calls[to].output, received, count), bytes_of(calls[from].input, sent[from], count));
      received += count;
      sent[from] += count;
    }
  }
}

}  // namespace

void execute(c10::ArrayRef<LocalCall> calls) {
  switch (calls[0].kind) {
    case Collective::AllGather:
      return all_gather(calls);
    case Collective::ReduceScatter:
      return reduce_scatter(calls);
    case Collective::AllReduce:
      return all_reduce(calls);
    case Collective::Broadcast:
      return broadcast(calls);
    case Collective::AllToAll:
      return all_to_all(calls);
    case Collective::Barrier:
      return;
    case Collective::Scatter:
    case Collective::Gather:
      break;
  }
  TESSERA_ASSERT(false, "{} is not a call of this backend", name(calls[0].kind));
}

}  // namespace tessera
