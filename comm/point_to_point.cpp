#include "comm/point_to_point.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/backend/group_backend.h"
#include "comm/call_checks.h"
#include "comm/recorded_call.h"

namespace tessera {

namespace {

c10::intrusive_ptr<c10d::Backend> check_message(Collective kind, const at::Tensor& tensor, int peer,
                                                const ProcessGroupPtr& group) {
  detail::check_tensor(kind, "tensor", tensor);
  auto backend = detail::find_backend(kind, tensor.device().type(), group);
  if (const auto* const own = dynamic_cast<const GroupBackend*>(backend.get())) {
    check_peer(name(kind), peer, own->info());
  }
  return backend;
}

}  // namespace

Pending send_async(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag) {
  const auto backend = check_message(Collective::Send, tensor, peer, group);
  const detail::CallFacts facts{.kind = Collective::Send,
                                .bytes_sent = detail::bytes(tensor),
                                .dtype = tensor.scalar_type(),
                                .input_numel = tensor.numel(),
                                .peer = peer};
  std::vector<at::Tensor> tensors = {tensor};
  return detail::launch_recorded(facts, *backend, [&] { return backend->send(tensors, peer, tag); });
}

Pending recv_async(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag) {
  const auto backend = check_message(Collective::Recv, tensor, peer, group);
  const detail::CallFacts facts{
      .kind = Collective::Recv, .dtype = tensor.scalar_type(), .output_numel = tensor.numel(), .peer = peer};
  std::vector<at::Tensor> tensors = {tensor};
  return detail::launch_recorded(facts, *backend, [&] { return backend->recv(tensors, peer, tag); });
}

void send(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag) {
  send_async(tensor, peer, group, tag).wait();
}

void recv(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag) {
  recv_async(tensor, peer, group, tag).wait();
}

}  // namespace tessera
