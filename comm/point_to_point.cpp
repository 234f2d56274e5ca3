#include "comm/point_to_point.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/backend/group_backend.h"
#include "comm/call_checks.h"
#include "comm/context/rank_state.h"

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
  detail::count_collective(Collective::Send, detail::bytes(tensor));
  std::vector<at::Tensor> tensors = {tensor};
  return Pending(backend->send(tensors, peer, tag));
}

Pending recv_async(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag) {
  const auto backend = check_message(Collective::Recv, tensor, peer, group);
  detail::count_collective(Collective::Recv, 0);
  std::vector<at::Tensor> tensors = {tensor};
  return Pending(backend->recv(tensors, peer, tag));
}

void send(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag) {
  send_async(tensor, peer, group, tag).wait();
}

void recv(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag) {
  recv_async(tensor, peer, group, tag).wait();
}

}  // namespace tessera
