// scatter and gather of comm/collectives.h: an all_to_all in which only one rank sends, or only one receives.

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/call_checks.h"
#include "comm/collectives.h"
#include "comm/rank_state.h"

namespace tessera {

namespace {

// The parts of the root: one for each rank, of the dtype and device of `own`, the root's own part of the same size.
void check_parts(Collective kind, const std::vector<at::Tensor>& parts, const at::Tensor& own, int root, int size) {
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

void exchange(Collective kind, at::Tensor output, at::Tensor input, std::vector<int64_t> output_splits,
              std::vector<int64_t> input_splits, const ProcessGroupPtr& group) {
  const auto backend = detail::backend_of(kind, input.device().type(), group);
  backend->alltoall_base(output, input, output_splits, input_splits)->wait();
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
  if (rank == source) {
    check_parts(kind, inputs, output, source, size);
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
  detail::count_collective(kind, rank == source ? bytes_to_peers(packed, output.numel()) : 0);
  exchange(kind, output.view(-1), packed, std::move(receives), std::move(sends), group);
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
  if (rank == destination) {
    check_parts(kind, outputs, input, destination, size);
    for (int from = 0; from < size; ++from) {
      receives[from] = outputs[from].numel();
      total += receives[from];
    }
  }
  at::Tensor packed = input.view(-1);
  if (size != 1) {
    detail::count_collective(kind, rank == destination ? 0 : bytes_to_peers(input, 0));
    packed = at::empty({total}, input.options());
    exchange(kind, packed, input.view(-1), receives, std::move(sends), group);
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
