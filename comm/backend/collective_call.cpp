#include "comm/backend/collective_call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "comm/backend/backend_checks.h"
#include "comm/backend/group_backend.h"

namespace tessera {

namespace {

bool is_message(Collective kind) {
  return kind == Collective::Send || kind == Collective::Recv;
}

bool same_call(const CollectiveSignature& a, const CollectiveSignature& b) {
  const bool same_sizes = a.kind == Collective::AllToAll || (a.output == b.output && a.input == b.input);
  return a.kind == b.kind && a.op == b.op && a.root == b.root && a.dtype == b.dtype && a.device == b.device &&
         same_sizes;
}

/// Returns a tensor of the call, undefined for a call without tensors.
const at::Tensor& any_tensor(const CollectiveCall& call) {
  return call.input.defined() ? call.input : call.output;
}

// Returns the number of elements, without a tensor that of the segments, or -1.
int64_t numel(const at::Tensor& tensor, const CollectiveCall& call) {
  return tensor.defined() ? tensor.numel() : call.parts_numel;
}

std::string find_message_mismatch(const CollectiveSignature& send, const CollectiveSignature& recv) {
  const bool fit = send.kind == Collective::Send && recv.kind == Collective::Recv && send.tag == recv.tag &&
                   send.dtype == recv.dtype && send.device == recv.device && send.input == recv.output;
  return fit ? ""
             : fmt::format("what is sent is not what is received: rank {}: {}; rank {}: {}", recv.root, describe(send),
                           send.root, describe(recv));
}

std::string find_split_mismatch(c10::ArrayRef<CollectiveSignature> calls) {
  for (size_t from = 0; from < calls.size(); ++from) {
    for (size_t to = 0; to < calls.size(); ++to) {
      const int64_t sends = calls[from].input_splits[to], expects = calls[to].output_splits[from];
      if (sends != expects) {
        return fmt::format("all_to_all: rank {} sends {} elements to rank {}, which expects {}", from, sends, to,
                           expects);
      }
    }
  }
  return "";
}

}  // namespace

CollectiveCall message_call(Collective kind, const std::vector<at::Tensor>& tensors, int peer, int tag,
                            const GroupInfo& info) {
  const char* const place = kind == Collective::Send ? "send" : "recv";
  const at::Tensor& tensor = only_tensor(place, tensors);
  check_dense_tensor(place, tensor);
  check_peer(place, peer, info);
  CollectiveCall call{.kind = kind, .root = peer, .tag = tag};
  (kind == Collective::Send ? call.input : call.output) = tensor;
  return call;
}

c10::Device call_device(const CollectiveCall& call) {
  const at::Tensor& any = any_tensor(call);
  return any.defined() ? any.device() : c10::Device(c10::kCPU);
}

CollectiveSignature make_signature(const CollectiveCall& call) {
  const at::Tensor& any = any_tensor(call);
  return {.kind = call.kind,
          .op = call.op,
          .root = call.root,
          .tag = call.tag,
          .dtype = any.defined() ? any.scalar_type() : c10::ScalarType::Undefined,
          .device = call_device(call),
          .output = numel(call.output, call),
          .input = numel(call.input, call),
          .input_splits = call.input_splits,
          .output_splits = call.output_splits};
}

std::string describe(const CollectiveSignature& call) {
  std::string text = fmt::format("{}(", name(call.kind));
  if (call.kind == Collective::AllReduce || call.kind == Collective::ReduceScatter) {
    text += fmt::format("{}, ", call.op);
  } else if (call.kind == Collective::Broadcast) {
    text += fmt::format("source {}, ", call.root);
  } else if (is_message(call.kind)) {
    text += fmt::format("{} rank {}, tag {}, ", call.kind == Collective::Send ? "to" : "from", call.root, call.tag);
  }
  const int64_t sent = call.input >= 0 ? call.input : call.output;
  if (sent >= 0) {
    text += fmt::format("{}[{}]", c10::toString(call.dtype), sent);
  }
  return text + (call.device.is_cpu() ? ")" : fmt::format(" on {})", call.device.str()));
}

std::string describe(const CollectiveCall& call) {
  return describe(make_signature(call));
}

std::string find_mismatch(c10::ArrayRef<CollectiveSignature> calls) {
  if (is_message(calls[0].kind)) {
    return find_message_mismatch(calls[0], calls[1]);
  }
  for (const CollectiveSignature& call : calls) {
    if (!same_call(calls[0], call)) {
      std::vector<std::string> texts;
      for (size_t rank = 0; rank < calls.size(); ++rank) {
        texts.push_back(fmt::format("rank {}: {}", rank, describe(calls[rank])));
      }
      return fmt::format("the ranks called different collectives: {}", fmt::join(texts, "; "));
    }
  }
  return calls[0].kind == Collective::AllToAll ? find_split_mismatch(calls) : "";
}

}  // namespace tessera
