#include "comm/backend/collective_call_backend.h"

#include <utility>

#include "base/error.h"
#include "comm/backend/backend_checks.h"
#include "comm/backend/local_reduce.h"

namespace tessera {

void CollectiveCallBackend::check(std::string_view place, const at::Tensor& tensor) const {
  check_dense_tensor(place, tensor);
  TESSERA_CHECK(ValueError, takes_device(tensor.device().type()),
                "{}: a tensor on {}; backend {} is for tensors of the cpu{}", place, tensor.device().str(),
                getBackendName(), takes_device(c10::DeviceType::CUDA) ? " and of cuda" : "");
}

void CollectiveCallBackend::check(std::string_view place, const at::Tensor& output, const at::Tensor& input) const {
  check(place, output);
  check(place, input);
  TESSERA_CHECK(ValueError, output.device() == input.device(), "{}: input on {} and output on {}; one device is needed",
                place, input.device().str(), output.device().str());
}

c10::intrusive_ptr<c10d::Work> CollectiveCallBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                      const c10d::AllgatherOptions&) {
  check("all_gather", output, input);
  check_all_gather(output, input, getSize());
  return post({.kind = Collective::AllGather, .output = output, .input = input});
}

c10::intrusive_ptr<c10d::Work> CollectiveCallBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                           const c10d::ReduceScatterOptions& options) {
  check("reduce_scatter", output, input);
  const ReduceOp op = check_reduce_scatter(output, input, options.reduceOp, getSize());
  return post({.kind = Collective::ReduceScatter, .op = op, .output = output, .input = input});
}

c10::intrusive_ptr<c10d::Work> CollectiveCallBackend::all_gather_segments(TensorSegments outputs,
                                                                          const at::Tensor& input) {
  check_cpu_tensor("all_gather input", input);
  check_written_segments("all_gather", *outputs, input, getSize());
  return post({.kind = Collective::AllGather,
               .input = input,
               .parts = std::move(outputs),
               .parts_numel = getSize() * input.numel()});
}

c10::intrusive_ptr<c10d::Work> CollectiveCallBackend::reduce_scatter_segments(const at::Tensor& output,
                                                                              TensorSegments inputs, ReduceOp op) {
  check_cpu_tensor("reduce_scatter output", output);
  check_reducible("reduce_scatter", output.scalar_type(), op);
  check_segments("reduce_scatter", *inputs, output, getSize());
  return post({.kind = Collective::ReduceScatter,
               .op = op,
               .output = output,
               .parts = std::move(inputs),
               .parts_numel = getSize() * output.numel()});
}

c10::intrusive_ptr<c10d::Work> CollectiveCallBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                                const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only_tensor("all_reduce", tensors);
  check("all_reduce", tensor);
  const ReduceOp op = check_all_reduce(tensor, options.reduceOp);
  return post({.kind = Collective::AllReduce, .op = op, .output = tensor});
}

c10::intrusive_ptr<c10d::Work> CollectiveCallBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                                const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only_tensor("broadcast", tensors);
  check("broadcast", tensor);
  const int source = check_broadcast(options, getSize());
  return post({.kind = Collective::Broadcast, .root = source, .output = tensor});
}

c10::intrusive_ptr<c10d::Work> CollectiveCallBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                                    std::vector<int64_t>& output_splits,
                                                                    std::vector<int64_t>& input_splits,
                                                                    const c10d::AllToAllOptions&) {
  check("all_to_all", output, input);
  auto splits = check_all_to_all(output, input, output_splits, input_splits, getRank(), getSize());
  return post({.kind = Collective::AllToAll,
               .output = output,
               .input = input,
               .input_splits = std::move(splits.sends),
               .output_splits = std::move(splits.receives)});
}

c10::intrusive_ptr<c10d::Work> CollectiveCallBackend::barrier(const c10d::BarrierOptions&) {
  return post({.kind = Collective::Barrier});
}

c10::intrusive_ptr<c10d::Work> CollectiveCallBackend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  CollectiveCall call = message_call(Collective::Send, tensors, to, tag, info());
  check("send", call.input);
  return post_message(std::move(call), {.from = getRank(), .to = to});
}

c10::intrusive_ptr<c10d::Work> CollectiveCallBackend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  CollectiveCall call = message_call(Collective::Recv, tensors, from, tag, info());
  check("recv", call.output);
  return post_message(std::move(call), {.from = from, .to = getRank()});
}

}  // namespace tessera
