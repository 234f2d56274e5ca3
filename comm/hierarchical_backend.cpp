#include "comm/hierarchical_backend.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "base/error.h"
#include "comm/backend/backend_checks.h"
#include "comm/backend/job_thread.h"

namespace tessera {

namespace {

/// Waits until the output may be used and the input written.
void wait_for_readers(const WorkPtr& work) {
  work->wait();
  if (const auto zero_copy = find_zero_copy(work)) {
    zero_copy->wait_for_readers();
  }
}

class HierarchicalBackend final : public GroupBackend {
 public:
  explicit HierarchicalBackend(HierarchicalOptions options)
      : GroupBackend(std::move(options.info)),
        layout_(options.layout),
        host_(std::move(options.host)),
        across_(std::move(options.across)),
        make_flat_(std::move(options.make_flat)) {
    TESSERA_ASSERT(host_->supports_segments(at::kCPU) && host_->getSize() == layout_.per_host &&
                       across_->getSize() == layout_.hosts,
                   "{} ranks on a host and {} across for {} x {}", host_->getSize(), across_->getSize(), layout_.hosts,
                   layout_.per_host);
  }

  const std::string getBackendName() const override { return "hierarchical"; }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    check_cpu_tensor("all_gather output", output);
    check_cpu_tensor("all_gather input", input);
    check_all_gather(output, input, getSize());
    return launch("all_gather", [this, output, input]() mutable {
      auto column = at::empty({layout_.hosts * input.numel()}, input.options());
      across_->_allgather_base(column, input)->wait();
      host_->all_gather_segments(by_host(output, input.numel()), column)->wait();
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    check_cpu_tensor("reduce_scatter output", output);
    check_cpu_tensor("reduce_scatter input", input);
    const ReduceOp op = check_reduce_scatter(output, input, options.reduceOp, getSize());
    return launch("reduce_scatter", [this, output, input, op, options]() mutable {
      auto column = at::empty({layout_.hosts * output.numel()}, output.options());
      wait_for_readers(host_->reduce_scatter_segments(column, by_host(input, output.numel()), op));
      across_->_reduce_scatter_base(output, column, options)->wait();
    });
  }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor& tensor = only_cpu_tensor("all_reduce", tensors);
    const ReduceOp op = check_all_reduce(tensor, options.reduceOp);
    return launch("all_reduce", [this, tensor, op, options] {
      const int64_t numel = (tensor.numel() + layout_.per_host - 1) / layout_.per_host;
      std::vector<at::Tensor> own{at::empty({numel}, tensor.options())};
      const auto parts = std::make_shared<const std::vector<TensorSegment>>(
          std::vector<TensorSegment>{{.offset = 0, .numel = numel, .tensor = flat_elements(tensor)}});
      host_->reduce_scatter_segments(own[0], parts, op)->wait();
      across_->allreduce(own, options)->wait();
      host_->all_gather_segments(parts, own[0])->wait();
    });
  }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    only_cpu_tensor("broadcast", tensors);
    const int root = check_broadcast(options, getSize());
    return launch("broadcast", [this, list = tensors, root]() mutable {
      if (layout_.local_rank(root) == layout_.local_rank(getRank())) {
        c10d::BroadcastOptions from;
        from.rootRank = layout_.host_index(root);
        across_->broadcast(list, from)->wait();
      }
      c10d::BroadcastOptions from;
      from.rootRank = layout_.local_rank(root);
      host_->broadcast(list, from)->wait();
    });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    check_cpu_tensor("all_to_all output", output);
    check_cpu_tensor("all_to_all input", input);
    check_all_to_all(output, input, output_splits, input_splits, getRank(), getSize());
    return launch("all_to_all", [this, output, input, output_splits, input_splits, options]() mutable {
      flat_ = flat_ ? flat_ : make_flat_();
      flat_->alltoall_base(output, input, output_splits, input_splits, options)->wait();
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return launch("barrier", [this, options] {
      host_->barrier(options)->wait();
      across_->barrier(options)->wait();
    });
  }

  // Not on the thread, where a waiting recv would block the calls that its peer waits for.
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    const auto [backend, peer] = way_to("send", to);
    return backend.send(tensors, peer, tag);
  }

  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    const auto [backend, peer] = way_to("recv", from);
    return backend.recv(tensors, peer, tag);
  }

 private:
  struct ChannelToPeer {
    GroupBackend& backend;
    int peer;  // rank in the group
  };

  ChannelToPeer way_to(const char* call, int peer) const {
    check_peer(call, peer, info());
    if (layout_.host_index(peer) == layout_.host_index(getRank())) {
      return {*host_, layout_.local_rank(peer)};
    }
    TESSERA_CHECK(NotImplementedError, layout_.local_rank(peer) == layout_.local_rank(getRank()),
                  "{}: peer {} on {} has another place on another host, where backend \"hierarchical\" has no "
                  "connection; make a group of the two ranks by new_group(), or choose backend \"gloo\"",
                  call, peer, describe(info()));
    return {*across_, layout_.host_index(peer)};
  }

  /// Returns the ranks' flat elements, `numel` per rank, as one segment per host, with one piece for each host.
  TensorSegments by_host(const at::Tensor& tensor, int64_t numel) const {
    std::vector<TensorSegment> parts;
    const int64_t host_numel = layout_.per_host * numel;
    for (int64_t host = 0; host < layout_.hosts; ++host) {
      parts.push_back(
          {.offset = host * numel, .numel = numel, .tensor = flat_elements(tensor, host * host_numel, host_numel)});
    }
    return std::make_shared<const std::vector<TensorSegment>>(std::move(parts));
  }

  WorkPtr launch(const char* what, std::function<void()> job) {
    return thread_.push(fmt::format("{} on {}", what, describe(info())), std::move(job));
  }

  const HostLayout layout_;
  const c10::intrusive_ptr<GroupBackend> host_, across_;
  const std::function<c10::intrusive_ptr<GroupBackend>()> make_flat_;
  c10::intrusive_ptr<GroupBackend> flat_;
  JobThread thread_;  // last, because its jobs use the others
};

}  // namespace

c10::intrusive_ptr<GroupBackend> make_hierarchical_backend(HierarchicalOptions options) {
  return c10::make_intrusive<HierarchicalBackend>(std::move(options));
}

}  // namespace tessera
