#include "comm/collectives.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/backend/backend_checks.h"
#include "comm/backend/group_backend.h"
#include "comm/backend/local_reduce.h"
#include "comm/call_checks.h"
#include "comm/recorded_call.h"

namespace tessera {

namespace {

using detail::bytes;
using detail::CallFacts;
using detail::check_rank;
using detail::check_tensor;
using detail::find_backend;
using detail::launch_recorded;
using detail::tensor_facts;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

void check_pair(Collective kind, const at::Tensor& output, const at::Tensor& input) {
  check_tensor(kind, "output", output);
  check_tensor(kind, "input", input);
  TESSERA_CHECK(ValueError, output.scalar_type() == input.scalar_type(),
                "{}: input {} and output {}; one dtype is needed", name(kind), c10::toString(input.scalar_type()),
                c10::toString(output.scalar_type()));
  TESSERA_CHECK(ValueError, output.device() == input.device(), "{}: input on {} and output on {}; one device is needed",
                name(kind), input.device().str(), output.device().str());
}

/// Throws ValueError if `whole` and `part` overlap, unless the part is this rank's chunk of the whole: peers would read
/// data that is being written.
void check_overlap(Collective kind, const at::Tensor& whole, const at::Tensor& part, int rank) {
  const auto status = at::get_overlap_status(whole, part);
  if (status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial) {
    return;
  }
  const auto* const own = static_cast<const char*>(whole.const_data_ptr()) + rank * bytes(part);
  TESSERA_CHECK(ValueError, kind != Collective::AllToAll && part.const_data_ptr() == own,
                "{}: input and output overlap{}; clone() one of them", name(kind),
                kind == Collective::AllToAll ? "" : ", and not so that one is this rank's part of the other");
}

void check_reduction(Collective kind, const at::Tensor& tensor, ReduceOp op) {
  check_reducible(name(kind), tensor.scalar_type(), op);
}

// Performs a collective in a group of one rank.
void copy_own(const at::Tensor& output, const at::Tensor& input) {
  if (output.const_data_ptr() == input.const_data_ptr()) {
    return;
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  output.view(-1).copy_(input.view(-1), /*non_blocking=*/true);
}

template <class Wait>
void wait_recorded(const FlightCall& call, Wait&& wait) {
  const detail::FlightRange range("wait", call);
  call.wait_begins();
  try {
    wait();
  } catch (...) {
    call.ends(FlightState::Failed);
    throw;
  }
  call.ends(FlightState::Done);
}

/// Returns null if the group does not support segments.
GroupBackend* find_segments_backend(const BackendPtr& backend, c10::DeviceType device) {
  auto* const own = dynamic_cast<GroupBackend*>(backend.get());
  return own != nullptr && own->supports_segments(device) && backend->getSize() > 1 ? own : nullptr;
}

GroupBackend& parts_backend(Collective kind, const BackendPtr& backend, const at::Tensor& flat) {
  auto* const own = find_segments_backend(backend, flat.device().type());
  TESSERA_CHECK(NotImplementedError, own != nullptr,
                "{} with parts on {} over backend {} and {} ranks; ask supports_segments() first", name(kind),
                flat.device().str(), backend->getBackendName(), backend->getSize());
  return *own;
}

}  // namespace

Pending::Pending() noexcept = default;
Pending::Pending(c10::intrusive_ptr<c10d::Work> work, FlightCall call) noexcept
    : work_(std::move(work)), call_(std::move(call)) {}
Pending::Pending(Pending&&) noexcept = default;
Pending& Pending::operator=(Pending&&) noexcept = default;
Pending::~Pending() = default;

void Pending::wait() {
  if (!work_) {
    return;
  }
  wait_recorded(call_, [this] { work_->wait(); });
  being_read_ = find_zero_copy(work_);
  work_.reset();
}

void Pending::wait_for_readers() {
  if (being_read_) {
    wait_recorded(call_, [this] { being_read_->wait_for_readers(); });
    being_read_.reset();
  }
}

bool Pending::discard() {
  try {
    wait();
    wait_for_readers();
    return true;
  } catch (const CommError&) {
    work_.reset();
    being_read_.reset();
    return false;
  }
}

Pending all_gather_async(const at::Tensor& output, const at::Tensor& input, const ProcessGroupPtr& group) {
  constexpr Collective kind = Collective::AllGather;
  check_pair(kind, output, input);
  const BackendPtr backend = find_backend(kind, input.device().type(), group);
  const int64_t size = backend->getSize();
  TESSERA_CHECK(ValueError, output.numel() == size * input.numel(),
                "all_gather: input has {} elements and output {}; {} ranks make {}", input.numel(), output.numel(),
                size, size * input.numel());
  check_overlap(kind, output, input, backend->getRank());
  if (size == 1) {
    copy_own(output, input);
    return Pending();
  }
  at::Tensor to = output, from = input;
  return launch_recorded(tensor_facts(kind, (size - 1) * bytes(input), input, output), *backend,
                         [&] { return backend->_allgather_base(to, from); });
}

Pending reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                             const ProcessGroupPtr& group) {
  constexpr Collective kind = Collective::ReduceScatter;
  check_pair(kind, output, input);
  check_reduction(kind, input, op);
  const BackendPtr backend = find_backend(kind, input.device().type(), group);
  const int64_t size = backend->getSize();
  TESSERA_CHECK(ValueError, input.numel() == size * output.numel(),
                "reduce_scatter: input has {} elements and output {}; {} ranks need {}", input.numel(), output.numel(),
                size, size * output.numel());
  check_overlap(kind, input, output, backend->getRank());
  if (size == 1) {
    copy_own(output, input);
    return Pending();
  }
  CallFacts facts = tensor_facts(kind, (size - 1) * bytes(output), input, output);
  facts.op = static_cast<int>(op);
  at::Tensor to = output, from = input;
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op_to_c10d(op);
  return launch_recorded(facts, *backend, [&] { return backend->_reduce_scatter_base(to, from, options); });
}

bool supports_segments(const ProcessGroupPtr& group, c10::DeviceType device) {
  return find_segments_backend(find_backend(Collective::AllGather, device, group), device) != nullptr;
}

Pending all_gather_segments_async(TensorSegments outputs, const at::Tensor& input, const ProcessGroupPtr& group) {
  constexpr Collective kind = Collective::AllGather;
  check_tensor(kind, "input", input);
  const BackendPtr backend = find_backend(kind, input.device().type(), group);
  GroupBackend& own = parts_backend(kind, backend, input);
  const int64_t size = backend->getSize();
  const CallFacts facts{.kind = kind,
                        .bytes_sent = (size - 1) * bytes(input),
                        .dtype = input.scalar_type(),
                        .input_numel = input.numel(),
                        .output_numel = size * input.numel()};
  return launch_recorded(facts, own, [&] { return own.all_gather_segments(std::move(outputs), input); });
}

at::Tensor zeros_to_gather(int64_t numel, at::ScalarType dtype, const ProcessGroupPtr& group) {
  const BackendPtr backend = find_backend(Collective::AllGather, c10::DeviceType::CPU, group);
  const auto* const own = find_segments_backend(backend, c10::DeviceType::CPU);
  TESSERA_CHECK(NotImplementedError, own != nullptr,
                "memory to gather from over backend {} and {} ranks; ask supports_segments() first",
                backend->getBackendName(), backend->getSize());
  return own->zeros_to_gather(numel, dtype);
}

Pending reduce_scatter_segments_async(const at::Tensor& output, TensorSegments inputs, ReduceOp op,
                                      const ProcessGroupPtr& group) {
  constexpr Collective kind = Collective::ReduceScatter;
  check_tensor(kind, "output", output);
  check_reduction(kind, output, op);
  const BackendPtr backend = find_backend(kind, output.device().type(), group);
  GroupBackend& own = parts_backend(kind, backend, output);
  const int64_t size = backend->getSize();
  const CallFacts facts{.kind = kind,
                        .bytes_sent = (size - 1) * bytes(output),
                        .dtype = output.scalar_type(),
                        .input_numel = size * output.numel(),
                        .output_numel = output.numel(),
                        .op = static_cast<int>(op)};
  return launch_recorded(facts, own, [&] { return own.reduce_scatter_segments(output, std::move(inputs), op); });
}

Pending all_reduce_async(const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group) {
  constexpr Collective kind = Collective::AllReduce;
  check_tensor(kind, "tensor", tensor);
  check_reduction(kind, tensor, op);
  const BackendPtr backend = find_backend(kind, tensor.device().type(), group);
  const int64_t size = backend->getSize();
  if (size == 1) {
    return Pending();
  }
  CallFacts facts = tensor_facts(kind, 2 * (size - 1) * bytes(tensor) / size, tensor, tensor);
  facts.op = static_cast<int>(op);
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op_to_c10d(op);
  return launch_recorded(facts, *backend, [&] { return backend->allreduce(tensors, options); });
}

Pending broadcast_async(const at::Tensor& tensor, int source, const ProcessGroupPtr& group) {
  constexpr Collective kind = Collective::Broadcast;
  check_tensor(kind, "tensor", tensor);
  const BackendPtr backend = find_backend(kind, tensor.device().type(), group);
  const int64_t size = backend->getSize();
  check_rank(kind, "source", source, size);
  if (size == 1) {
    return Pending();
  }
  CallFacts facts = tensor_facts(kind, backend->getRank() == source ? (size - 1) * bytes(tensor) : 0, tensor, tensor);
  facts.peer = source;
  std::vector<at::Tensor> tensors = {tensor};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  return launch_recorded(facts, *backend, [&] { return backend->broadcast(tensors, options); });
}

Pending all_to_all_async(const at::Tensor& output, const at::Tensor& input, std::vector<int64_t> output_splits,
                         std::vector<int64_t> input_splits, const ProcessGroupPtr& group) {
  constexpr Collective kind = Collective::AllToAll;
  check_pair(kind, output, input);
  const BackendPtr backend = find_backend(kind, input.device().type(), group);
  const int size = backend->getSize(), rank = backend->getRank();
  const auto splits = check_all_to_all(output, input, output_splits, input_splits, rank, size);
  check_overlap(kind, output, input, rank);
  if (size == 1) {
    copy_own(output, input);
    return Pending();
  }
  const int64_t sent = bytes(input) - splits.sends[rank] * static_cast<int64_t>(input.element_size());
  at::Tensor to = output, from = input;
  return launch_recorded(tensor_facts(kind, sent, input, output), *backend,
                         [&] { return backend->alltoall_base(to, from, output_splits, input_splits); });
}

void all_gather(const at::Tensor& output, const at::Tensor& input, const ProcessGroupPtr& group) {
  all_gather_async(output, input, group).wait();
}

void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const ProcessGroupPtr& group) {
  reduce_scatter_async(output, input, op, group).wait();
}

void all_reduce(const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group) {
  all_reduce_async(tensor, op, group).wait();
}

void broadcast(const at::Tensor& tensor, int source, const ProcessGroupPtr& group) {
  broadcast_async(tensor, source, group).wait();
}

void all_to_all(const at::Tensor& output, const at::Tensor& input, std::vector<int64_t> output_splits,
                std::vector<int64_t> input_splits, const ProcessGroupPtr& group) {
  all_to_all_async(output, input, std::move(output_splits), std::move(input_splits), group).wait();
}

void barrier(const ProcessGroupPtr& group) {
  TESSERA_CHECK(ValueError, group, "barrier: the process group is undefined");
  const BackendPtr backend = group->getDefaultBackend();
  if (backend->getSize() == 1) {
    return;
  }
  launch_recorded({.kind = Collective::Barrier}, *backend, [&] { return backend->barrier(); }).wait();
}

}  // namespace tessera
