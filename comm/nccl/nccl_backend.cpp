#include "comm/nccl/nccl_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <exception>
#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "base/report.h"
#include "comm/backend/backend_checks.h"
#include "comm/launch/host_process.h"
#include "comm/nccl/nccl_environment.h"
#include "comm/nccl/nccl_reduction.h"
#include "comm/nccl/nccl_work.h"
#include "cuda/device.h"

namespace tessera {

namespace {

using c10d::ProcessGroupNCCL;
using NcclPtr = c10::intrusive_ptr<ProcessGroupNCCL>;

class NcclBackend final : public GroupBackend {
 public:
  /// `scatter` is for reduce-scatters; null: use `nccl` for all.
  NcclBackend(GroupInfo info, c10::Device device, NcclPtr nccl, NcclPtr scatter)
      : GroupBackend(std::move(info)), device_(device), nccl_(std::move(nccl)), scatter_(std::move(scatter)) {}

  /// shutdown() waits for work in flight, and meanwhile libtorch's watchdog cannot abort it. Therefore it is skipped if
  /// peers may never join: after a failure, and if an exception destroys the group's owner.
  ~NcclBackend() override {
    try {
      const bool gives_up = std::uncaught_exceptions() > 0 || has_failed();
      on_each([=](ProcessGroupNCCL& nccl) { gives_up ? nccl.abort() : nccl.shutdown(); });
    } catch (const std::exception& failure) {
      report_failure("closing the NCCL communicator of {}: {}", describe(info()), failure.what());
    }
  }

  const std::string getBackendName() const override { return "nccl"; }
  void abort() override {
    on_each([](ProcessGroupNCCL& nccl) { nccl.abort(); });
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    on_each([&](ProcessGroupNCCL& nccl) { nccl.setTimeout(timeout); });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    check("all_gather output", output);
    check("all_gather input", input);
    check_all_gather(output, input, getSize());
    at::AutoDispatchBelowADInplaceOrView guard;
    at::Tensor to = flat_bytes(output), from = flat_bytes(input);  // NCCL does not support all dtypes
    return launch("all_gather", input.numel() == 0, [&] { return nccl_->_allgather_base(to, from, options); });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    check("reduce_scatter output", output);
    check("reduce_scatter input", input);
    const ReduceOp op = check_reduce_scatter(output, input, options.reduceOp, getSize());
    NcclReduction reduction = nccl_reduce_scatter(output, input, op);
    const NcclPtr& nccl = scatter_ ? scatter_ : nccl_;
    const auto start = [&] { return nccl->_reduce_scatter_base(reduction.output, reduction.input, options); };
    return launch("reduce_scatter", output.numel() == 0, nccl, start, std::move(reduction.finish));
  }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor& tensor = only_tensor("all_reduce", tensors);
    check("all_reduce", tensor);
    const ReduceOp op = check_all_reduce(tensor, options.reduceOp);
    NcclReduction reduction = nccl_all_reduce(tensor, op);
    std::vector<at::Tensor> one = {reduction.output};
    const auto start = [&] { return nccl_->allreduce(one, options); };
    return launch("all_reduce", tensor.numel() == 0, nccl_, start, std::move(reduction.finish));
  }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    const at::Tensor& tensor = only_tensor("broadcast", tensors);
    check("broadcast", tensor);
    at::AutoDispatchBelowADInplaceOrView guard;
    std::vector<at::Tensor> one = {flat_bytes(tensor)};
    return launch("broadcast", tensor.numel() == 0, [&] { return nccl_->broadcast(one, options); });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    check("all_to_all output", output);
    check("all_to_all input", input);
    auto splits = check_all_to_all(output, input, output_splits, input_splits, getRank(), getSize());
    to_bytes(splits.sends, input);
    to_bytes(splits.receives, output);
    at::AutoDispatchBelowADInplaceOrView guard;
    at::Tensor to = flat_bytes(output), from = flat_bytes(input);
    return launch("all_to_all", false,
                  [&] { return nccl_->alltoall_base(to, from, splits.receives, splits.sends, options); });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions own = options;
    own.device_ids = {device_.index()};
    return launch("barrier", false, [&] { return nccl_->barrier(own); });
  }

  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    std::vector<at::Tensor> one = {message("send", tensors, to)};
    return launch("send", one[0].numel() == 0, [&] { return nccl_->send(one, to, tag); });
  }

  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    std::vector<at::Tensor> one = {message("recv", tensors, from)};
    return launch("recv", one[0].numel() == 0, [&] { return nccl_->recv(one, from, tag); });
  }

 private:
  void check(const char* place, const at::Tensor& tensor) const {
    check_dense_tensor(place, tensor);
    TESSERA_CHECK(ValueError, tensor.device() == device_, "{}: a tensor on {}; this rank's GPU in {} is {}", place,
                  tensor.device().str(), describe(info()), device_.str());
  }

  at::Tensor message(const char* place, const std::vector<at::Tensor>& tensors, int peer) const {
    const at::Tensor& tensor = only_tensor(place, tensors);
    check(place, tensor);
    check_peer(place, peer, info());
    at::AutoDispatchBelowADInplaceOrView guard;
    return flat_bytes(tensor);
  }

  static void to_bytes(std::vector<int64_t>& splits, const at::Tensor& tensor) {
    for (int64_t& split : splits) {
      split *= static_cast<int64_t>(tensor.element_size());
    }
  }

  bool has_failed() const {
    const auto failed = [](const NcclPtr& nccl) { return nccl->getError() != c10d::ErrorType::SUCCESS; };
    return failed(nccl_) || (scatter_ && failed(scatter_));
  }

  template <typename Action>
  void on_each(const Action& action) {
    action(*nccl_);
    if (scatter_) {
      action(*scatter_);
    }
  }

  template <typename Launch>
  WorkPtr launch(const char* what, bool empty, Launch&& start) {
    return launch(what, empty, nccl_, std::forward<Launch>(start));
  }

  /// `finish` is the remaining work for wait().
  template <typename Launch>
  WorkPtr launch(const char* what, bool empty, const NcclPtr& nccl, Launch&& start,
                 std::function<void()> finish = nullptr) {
    if (empty) {
      return c10::make_intrusive<CompletedWork>();
    }
    on_each([&](ProcessGroupNCCL& each) { check_nccl_alive(what, info(), each); });
    try {
      return c10::make_intrusive<NcclWork>(what, shared_info(), nccl, start(), std::move(finish));
    } catch (const std::exception& failure) {
      throw nccl_error(what, info(), failure.what());
    }
  }

  const c10::Device device_;
  const NcclPtr nccl_, scatter_;
};

NcclPtr make_communicator(const NcclBackendOptions& options, c10::intrusive_ptr<c10d::Store> store) {
  auto nccl_options = ProcessGroupNCCL::Options::create(options.nccl.high_priority_stream);
  nccl_options->timeout = options.info.timeout;
  nccl_options->group_name = options.info.name;
  for (const int64_t rank : options.info.ranks) {
    nccl_options->global_ranks_in_group.push_back(static_cast<uint64_t>(rank));
  }
  return c10::make_intrusive<ProcessGroupNCCL>(std::move(store), options.info.rank, options.info.size(),
                                               std::move(nccl_options));
}

/// ProcessGroupNCCL::Options contains NCCL's configuration by value. With another version's header, its constructor in
/// libtorch would write past the end of the memory allocated here.
void check_header() {
  const uint64_t built = torch::cuda::nccl::version();
  const auto own = (uint64_t{NCCL_MAJOR} << 32) | (uint64_t{NCCL_MINOR} << 16) | NCCL_PATCH;
  TESSERA_CHECK(
      StateError, built == own,
      "init_process_group: this program was compiled with the header of NCCL {}.{}.{}, libtorch with {}.{}.{}; "
      "build it again with this libtorch (./bazelw sync --only=cuda)",
      NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH, built >> 32, (built >> 16) & 0xffff, built & 0xffff);
}

void set_environment(const std::string& flight_record_prefix) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  set_nccl_environment(flight_record_prefix);
}

std::string device_uuid(int device) {
  cudaDeviceProp properties;
  cuda::check_cuda(cudaGetDeviceProperties(&properties, device), "init_process_group");
  std::string text = "GPU-";
  for (const char byte : properties.uuid.bytes) {
    text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  }
  return text;
}

}  // namespace

void check_nccl_is_built() {}

DeviceReport report_devices(int local_rank, int wish) {
  check_header();
  DeviceReport report{.host = this_process().host, .local_rank = local_rank, .wish = wish, .shares = shares_gpus()};
  try {
    for (int device = 0; device < cuda::visible_devices(); ++device) {
      report.devices.push_back(device_uuid(device));
    }
    report.reason = report.devices.empty() ? cuda::no_device_message() : "";
  } catch (const StateError& failure) {  // reported to all ranks
    report.devices.clear();
    report.reason = failure.what();
  }
  return report;
}

void use_cuda_device(int device) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
}

c10::intrusive_ptr<GroupBackend> make_nccl_backend(NcclBackendOptions options) {
  check_header();
  set_environment(options.nccl.flight_record_prefix);
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(options.device));
  try {
    NcclPtr nccl = make_communicator(options, options.store), scatter;
    if (options.nccl.separate_reduce_scatter) {
      scatter = make_communicator(options, c10::make_intrusive<c10d::PrefixStore>("reduce_scatter", options.store));
    }
    return c10::make_intrusive<NcclBackend>(std::move(options.info), device, std::move(nccl), std::move(scatter));
  } catch (const std::exception& failure) {
    throw nccl_error("setting up NCCL", options.info, failure.what());
  }
}

std::string nccl_flight_record() {
  return c10d::dump_nccl_trace_json(/*includeCollectives=*/true, /*onlyActive=*/false);
}

}  // namespace tessera
