// scatter and gather of comm/collectives.h, as an all_to_all in which only one rank sends or receives.

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <exception>
#include <functional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/call_checks.h"
#include "comm/collectives.h"
#include "comm/recorded_call.h"

namespace tessera {

namespace {

// Checks the root's parts: one per rank, with the dtype, device and size of `own`, the root's own part.
void check_root_segments(Collective kind, const std::vector<at::Tensor>& parts, const at::Tensor& own, int root,
                         int size) {
  TESSERA_CHECK(ValueError, parts.size() == static_cast<size_t>(size),
                "{}: {} tensors; one for each of {} ranks is needed", name(kind), parts.size(), size);
  for (const at::Tensor& part : parts) {
    TESSERA_CHECK(ValueError,
                  part.defined() && part.scalar_type() == own.scalar_type() && part.device() == own.device(),
                  "{}: every tensor must have dtype {} and be on {}", name(kind), c10::toString(own.scalar_type()),
                  own.device().str());
  }
  TESSERA_CHECK(ValueError, parts[root].numel() == own.numel(), "{}: rank {}'s own part has {} elements, not {}",
                name(kind), root, parts[root].numel(), own.numel());
}

/// Rethrows the error of `check` on the root, and throws ValueError on the others, which learn of it instead of
/// waiting.
void check_on_root(Collective kind, c10::DeviceType device, int root, const ProcessGroupPtr& group,
                   const std::function<void()>& check) {
  std::exception_ptr failure;
  if (get_rank(group) == root) {
    try {
      check();
    } catch (const ValueError&) {
      failure = std::current_exception();
    }
  }
  if (get_world_size(group) > 1) {
    std::vector<at::Tensor> fits{at::full({1}, failure == nullptr, at::device(device).dtype(at::kByte))};
    c10d::BroadcastOptions from;
    from.rootRank = root;
    detail::find_backend(kind, device, group)->broadcast(fits, from)->wait();
    TESSERA_CHECK(ValueError, failure || fits[0].item<bool>(),
                  "{}: the tensors that rank {} gave do not fit: see there", name(kind), root);
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void exchange(const detail::CallFacts& facts, at::Tensor output, at::Tensor input, std::vector<int64_t> output_splits,
              std::vector<int64_t> input_splits, const ProcessGroupPtr& group) {
  const auto backend = detail::find_backend(facts.kind, input.device().type(), group);
  const auto launch = [&] { return backend->alltoall_base(output, input, output_splits, input_splits); };
  detail::launch_recorded(facts, *backend, launch).wait();
}

int64_t bytes_to_peers(const at::Tensor& sent, int64_t own_elements) {
  return (sent.numel() - own_elements) * static_cast<int64_t>(sent.element_size());
}

}  // namespace

void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int source,
             const ProcessGroupPtr& group) {
  constexpr Collective kind = Collective::Scatter;
  detail::check_tensor(kind, "output", output);
  const int size = get_world_size(group), rank = get_rank(group);
  detail::check_rank(kind, "source", source, size);
  std::vector<int64_t> sends(size, 0), receives(size, 0);
  receives[source] = output.numel();
  at::Tensor packed = at::empty({0}, output.options());
  check_on_root(kind, output.device().type(), source, group,
                [&] { check_root_segments(kind, inputs, output, source, size); });
  if (rank == source) {
    std::vector<at::Tensor> flat;
    for (int to = 0; to < size; ++to) {
      flat.push_back(inputs[to].reshape(-1));
      sends[to] = flat.back().numel();
    }
    packed = at::cat(flat);
  }
  if (size == 1) {
    at::AutoDispatchBelowADInplaceOrView guard;
    output.view(-1).copy_(packed);
    return;
  }
  const detail::CallFacts facts{.kind = kind,
                                .bytes_sent = rank == source ? bytes_to_peers(packed, output.numel()) : 0,
                                .dtype = output.scalar_type(),
                                .output_numel = output.numel(),
                                .peer = source};
  exchange(facts, output.view(-1), packed, std::move(receives), std::move(sends), group);
}

void gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int destination,
            const ProcessGroupPtr& group) {
  constexpr Collective kind = Collective::Gather;
  detail::check_tensor(kind, "input", input);
  const int size = get_world_size(group), rank = get_rank(group);
  detail::check_rank(kind, "destination", destination, size);
  std::vector<int64_t> sends(size, 0), receives(size, 0);
  sends[destination] = input.numel();
  int64_t total = 0;
  check_on_root(kind, input.device().type(), destination, group,
                [&] { check_root_segments(kind, outputs, input, destination, size); });
  if (rank == destination) {
    for (int from = 0; from < size; ++from) {
      receives[from] = outputs[from].numel();
      total += receives[from];
    }
  }
  at::Tensor packed = input.view(-1);
  if (size != 1) {
    const detail::CallFacts facts{.kind = kind,
                                  .bytes_sent = rank == destination ? 0 : bytes_to_peers(input, 0),
                                  .dtype = input.scalar_type(),
                                  .input_numel = input.numel(),
                                  .peer = destination};
    packed = at::empty({total}, input.options());
    exchange(facts, packed, input.view(-1), receives, std::move(sends), group);
  }
  if (rank == destination) {
    at::AutoDispatchBelowADInplaceOrView guard;
    int64_t begin = 0;
    for (int from = 0; from < size; ++from) {
      outputs[from].copy_(packed.narrow(0, begin, receives[from]).view(outputs[from].sizes()));
      begin += receives[from];
    }
  }
}

}  // namespace tessera
