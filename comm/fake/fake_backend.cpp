#include "comm/fake/fake_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/backend/backend_checks.h"
#include "comm/backend/stream_copy.h"

namespace tessera {

namespace {

// Copies elements [from_begin, +count) of one contiguous tensor to [to_begin, +count) of another. No version changes.
void copy_part(const at::Tensor& to, int64_t to_begin, const at::Tensor& from, int64_t from_begin, int64_t count) {
  if (count == 0) {
    return;
  }
  if (!to.device().is_cpu() || to.dtype() != from.dtype()) {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.view(-1).narrow(0, to_begin, count).copy_(from.view(-1).narrow(0, from_begin, count));
    return;
  }
  const size_t item = to.element_size();
  char* target = static_cast<char*>(to.mutable_data_ptr()) + to_begin * item;
  const char* source = static_cast<const char*>(from.const_data_ptr()) + from_begin * item;
  if (target != source) {
    std::memmove(target, source, count * item);
  }
}

}  // namespace

FakeBackend::FakeBackend(GroupInfo info)
    : GroupBackend(std::move(info)), completed_(c10::make_intrusive<CompletedWork>()) {}

c10::intrusive_ptr<c10d::Work> FakeBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions&) {
  check_all_gather(output, input, getSize());
  const int64_t count = input.numel();
  for (int64_t rank = 0; rank < getSize(); ++rank) {
    copy_part(output, rank * count, input, 0, count);
  }
  return completed_;
}

c10::intrusive_ptr<c10d::Work> FakeBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::ReduceScatterOptions&) {
  check_reduce_scatter(output, input, getSize());
  const int64_t count = output.numel();
  copy_part(output, 0, input, getRank() * count, count);
  return completed_;
}

c10::intrusive_ptr<c10d::Work> FakeBackend::all_gather_segments(TensorSegments outputs, const at::Tensor& input) {
  check_written_segments("all_gather", *outputs, input, getSize());
  for (const auto& [offset, numel, tensor] : *outputs) {
    for (int64_t rank = 0; tensor.defined() && rank * numel < tensor.numel(); ++rank) {
      copy_part(tensor, rank * numel, input, offset, std::min(numel, tensor.numel() - rank * numel));
    }
  }
  return completed_;
}

c10::intrusive_ptr<c10d::Work> FakeBackend::reduce_scatter_segments(const at::Tensor& output, TensorSegments inputs,
                                                                    ReduceOp) {
  check_segments("reduce_scatter", *inputs, output, getSize());
  const PartRange whole{
      .dtype = output.scalar_type(), .rank = getRank(), .begin = 0, .bytes = static_cast<int64_t>(output.nbytes())};
  read_segments(*inputs, whole, static_cast<char*>(output.mutable_data_ptr()), kNeverStream);
  return completed_;
}

c10::intrusive_ptr<c10d::Work> FakeBackend::allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) {
  return completed_;
}

c10::intrusive_ptr<c10d::Work> FakeBackend::broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) {
  return completed_;
}

c10::intrusive_ptr<c10d::Work> FakeBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                          std::vector<int64_t>& output_splits,
                                                          std::vector<int64_t>& input_splits,
                                                          const c10d::AllToAllOptions&) {
  const auto [sends, receives] = check_all_to_all(output, input, output_splits, input_splits, getRank(), getSize());
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    output.zero_();
  }
  const auto before = [&](const std::vector<int64_t>& splits) {
    return std::accumulate(splits.begin(), splits.begin() + getRank(), int64_t{0});
  };
  copy_part(output, before(receives), input, before(sends), sends[getRank()]);
  return completed_;
}

c10::intrusive_ptr<c10d::Work> FakeBackend::barrier(const c10d::BarrierOptions&) {
  return completed_;
}

c10::intrusive_ptr<c10d::Work> FakeBackend::send(std::vector<at::Tensor>&, int to, int) {
  check_peer("send", to, info());
  return completed_;
}

c10::intrusive_ptr<c10d::Work> FakeBackend::recv(std::vector<at::Tensor>&, int from, int) {
  check_peer("recv", from, info());
  return completed_;
}

}  // namespace tessera
