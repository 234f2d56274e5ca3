#include "comm/gloo/gloo_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <signal.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/open_files.h"
#include "comm/backend/backend_checks.h"
#include "comm/backend/collective_call.h"
#include "comm/backend/local_reduce.h"
#include "comm/gloo/gloo_error.h"
#include "comm/gloo/gloo_messages.h"
#include "comm/gloo/gloo_rounds.h"
#include "comm/gloo/gloo_work.h"
#include "comm/launch/job_store.h"
#include "comm/launch/lost_host.h"

namespace tessera {

namespace {

using c10d::ProcessGroupGloo;
using GlooWorkPtr = c10::intrusive_ptr<GlooWork>;

// Up to this size, an all_reduce sends whole tensors to all ranks, in one round of messages instead of two. For two
// ranks, two rounds send as many bytes, and each rank adds half of them.
constexpr int64_t kGlooOneRoundBytes = int64_t{64} * 1024;
constexpr int64_t kGlooOneRoundBytesOfTwo = int64_t{1024} * 1024;

// For larger tensors, pieces are reduced while others are gathered. Each message wakes threads on both sides, so
// smaller pieces, or more at a time, take longer.
constexpr int64_t kGlooPieceBytes = int64_t{2} * 1024 * 1024;  // per rank
constexpr size_t kGlooPiecesInFlight = 2;

// A collective's tag has its number, a hash, and whether a thread launches it. A thread launches later than collectives
// with higher numbers, at a different time on each rank, so its tag must differ from all others.
constexpr int kNumberBits = 7;
constexpr int kHashBits = 22;
static_assert(1 << (1 + kNumberBits + kHashBits) == kGlooMessageTags);

/// Number of a group's launch, counted equally on all ranks.
struct LaunchNumber {
  uint64_t collective = 0;
  bool is_of_thread = false;
};

/// Returns the tag of one rank's data for another in a collective. Both compute it from everything on which they must
/// agree. Tags of ranks that differ are different, except in one of four million cases.
int make_tag(const CollectiveSignature& call, LaunchNumber number, size_t bytes) {
  const uint64_t what =
      static_cast<uint64_t>(call.kind) << 16 | static_cast<uint64_t>(call.op) << 8 | static_cast<uint64_t>(call.dtype);
  const uint64_t whole = hash_combine(what, static_cast<uint64_t>(call.output));  // not just the bytes of a piece
  const uint64_t hash = hash_combine(hash_combine(0, whole), bytes) >> (64 - kHashBits);
  const uint64_t launch = number.collective % (1 << kNumberBits) << 1 | static_cast<uint64_t>(number.is_of_thread);
  return static_cast<int>(launch << kHashBits | hash);
}

void copy_on_host(const at::Tensor& to, const at::Tensor& from) {
  void* const target = to.mutable_data_ptr();
  const void* const source = from.const_data_ptr();
  if (to.numel() != 0 && target != source) {
    std::memcpy(target, source, to.nbytes());
  }
}

/// Implements collectives as messages between each pair of ranks, even empty ones: gloo's device thread receives
/// directly into the outputs, which avoids the worker thread and staging copies of gloo's own collectives. gloo
/// delivers by sender and tag, in order. It ends the process if more bytes arrive than expected, and does not detect
/// fewer bytes or another purpose. Therefore calls that do not match have different tags, and their ranks time out.
class GlooBackend final : public GroupBackend {
 public:
  GlooBackend(GroupInfo info, c10::intrusive_ptr<ProcessGroupGloo> gloo, c10::intrusive_ptr<c10d::Store> notes,
              std::vector<HostProcess> members)
      : GroupBackend(std::move(info)),
        gloo_(std::move(gloo)),
        shared_(std::make_shared<GlooShared>(std::move(notes), getRank(), probe_peers(), std::move(members))),
        messages_(shared_info(), shared_, gloo_) {}

  const std::string getBackendName() const override { return "gloo"; }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    check_cpu_tensor("all_gather output", output);
    check_cpu_tensor("all_gather input", input);
    check_all_gather(output, input, getSize());
    const int64_t count = input.numel();
    at::AutoDispatchBelowADInplaceOrView guard;
    std::vector<at::Tensor> received;
    for (int64_t rank = 0; rank < getSize(); ++rank) {
      received.push_back(flat_elements(output, rank * count, count));
    }
    copy_on_host(received[getRank()], input);
    const std::vector<at::Tensor> sent(getSize(), input);
    return exchange({.kind = Collective::AllGather, .dtype = input.scalar_type(), .input = count}, next_number(), sent,
                    received);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    check_cpu_tensor("reduce_scatter output", output);
    check_cpu_tensor("reduce_scatter input", input);
    const ReduceOp op = check_reduce_scatter(output, input, options.reduceOp, getSize());
    const int64_t count = output.numel();
    at::AutoDispatchBelowADInplaceOrView guard;
    std::vector<at::Tensor> sent;
    for (int64_t rank = 0; rank < getSize(); ++rank) {
      sent.push_back(flat_elements(input, rank * count, count));
    }
    const at::Tensor own = sent[getRank()];
    const CollectiveSignature call{
        .kind = Collective::ReduceScatter, .op = op, .dtype = input.scalar_type(), .input = input.numel()};
    return reduce_received(call, next_number(), sent, own, output);
  }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor& tensor = only_cpu_tensor("all_reduce", tensors);
    const ReduceOp op = check_all_reduce(tensor, options.reduceOp);
    at::AutoDispatchBelowADInplaceOrView guard;
    const CollectiveSignature call{
        .kind = Collective::AllReduce, .op = op, .dtype = tensor.scalar_type(), .output = tensor.numel()};
    const int64_t one_round_bytes = getSize() > 2 ? kGlooOneRoundBytes : kGlooOneRoundBytesOfTwo;
    if (tensor.numel() * static_cast<int64_t>(tensor.element_size()) > one_round_bytes) {
      return all_reduce_in_pieces(call, tensor);
    }
    const std::vector<at::Tensor> sent(getSize(), tensor);
    return reduce_received(call, next_number(), sent, tensor, tensor);
  }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    const at::Tensor& tensor = only_cpu_tensor("broadcast", tensors);
    const int source = check_broadcast(options, getSize());
    std::vector<at::Tensor> sent(getSize()), received(getSize());
    if (source == getRank()) {
      sent.assign(getSize(), tensor);
    } else {
      received[source] = tensor;
    }
    return exchange(
        {.kind = Collective::Broadcast, .root = source, .dtype = tensor.scalar_type(), .output = tensor.numel()},
        next_number(), sent, received);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    check_cpu_tensor("all_to_all output", output);
    check_cpu_tensor("all_to_all input", input);
    const auto [sends, receives] = check_all_to_all(output, input, output_splits, input_splits, getRank(), getSize());
    at::AutoDispatchBelowADInplaceOrView guard;
    std::vector<at::Tensor> sent, received;
    int64_t sent_begin = 0, received_begin = 0;
    for (int rank = 0; rank < getSize(); ++rank) {
      sent.push_back(flat_elements(input, sent_begin, sends[rank]));
      received.push_back(flat_elements(output, received_begin, receives[rank]));
      sent_begin += sends[rank];
      received_begin += receives[rank];
    }
    copy_on_host(received[getRank()], sent[getRank()]);
    return exchange({.kind = Collective::AllToAll, .dtype = input.scalar_type(), .input = input.numel()}, next_number(),
                    sent, received);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    const std::vector<at::Tensor> nothing(getSize(), at::empty({0}, at::kByte));
    return exchange({.kind = Collective::Barrier}, next_number(), nothing, nothing);
  }

  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return launch_message(message_call(Collective::Send, tensors, to, tag, info()));
  }

  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return launch_message(message_call(Collective::Recv, tensors, from, tag, info()));
  }

 private:
  /// Receives for GlooWatch; messages have other tags.
  std::vector<WorkPtr> probe_peers() {
    std::vector<WorkPtr> probes(static_cast<size_t>(getSize()));
    for (int peer = 0; peer < getSize(); ++peer) {
      if (peer != getRank()) {
        std::vector<at::Tensor> nothing = {at::empty({0}, at::kByte)};
        try {
          probes[static_cast<size_t>(peer)] = gloo_->recv(nothing, peer, kGlooProbeTag);
        } catch (const std::exception&) {  // the peer is gone
        }
      }
    }
    return probes;
  }

  WorkPtr launch_message(const CollectiveCall& call) {
    check_cpu_tensor(name(call.kind), call.kind == Collective::Send ? call.input : call.output);
    const std::lock_guard lock(launch_mutex_);
    return messages_.launch(call);
  }

  LaunchNumber next_number() { return {.collective = collectives_++}; }

  // Sends sent[r] to rank r and receives received[r] from it, except undefined tensors and those for this rank.
  GlooWorkPtr exchange(const CollectiveSignature& call, LaunchNumber number, const std::vector<at::Tensor>& sent,
                       const std::vector<at::Tensor>& received, std::function<void()> finish = {}) {
    const std::lock_guard lock(launch_mutex_);
    const size_t with_all = 2 * (static_cast<size_t>(getSize()) - 1);
    std::list<GlooTransfers> transfers = {{.launch = launches_++, .collective = number.collective}};
    auto& works = transfers.front().works;
    works.reserve(with_all);
    try {
      for (int step = 1; step < getSize(); ++step) {
        const int from = (getRank() - step + getSize()) % getSize();
        if (received[from].defined()) {
          std::vector<at::Tensor> one = {received[from]};
          works.push_back({gloo_->recv(one, from, make_tag(call, number, one[0].nbytes())), from});
        }
      }
      for (int step = 1; step < getSize(); ++step) {
        const int to = (getRank() + step) % getSize();
        if (sent[to].defined()) {
          std::vector<at::Tensor> one = {sent[to]};
          works.push_back({gloo_->send(one, to, make_tag(call, number, one[0].nbytes())), to});
        }
      }
    } catch (const std::exception& failure) {
      shared_->dropped.keep(transfers);
      shared_->watch.check_members(describe(call), info(), getRank());
      throw gloo_error(describe(call), info(), failure);
    }
    transfers.front().with_all = works.size() == with_all;
    return c10::make_intrusive<GlooWork>(call, shared_info(), shared_, std::move(transfers), std::move(finish));
  }

  // Sends sent[r] to rank r, and reduces `own` and the received data into `output`, in rank order.
  GlooWorkPtr reduce_received(const CollectiveSignature& call, LaunchNumber number, const std::vector<at::Tensor>& sent,
                              const at::Tensor& own, const at::Tensor& output) {
    std::vector<at::Tensor> received;
    received.reserve(static_cast<size_t>(getSize()));
    for (int rank = 0; rank < getSize(); ++rank) {
      received.push_back(rank == getRank() ? own : at::empty({own.numel()}, own.options().requires_grad(false)));
    }
    auto finish = [received, output, op = call.op] {
      std::vector<const void*> inputs;
      inputs.reserve(received.size());
      for (const at::Tensor& tensor : received) {
        inputs.push_back(tensor.mutable_data_ptr());
      }
      reduce_in_order(output.mutable_data_ptr(), inputs, output.numel(), output.scalar_type(), op);
    };
    return exchange(call, number, sent, received, std::move(finish));
  }

  // Each piece is a reduce_scatter, followed by an all_gather of its result; pieces overlap. wait() does not launch
  // them, because it would hang if ranks wait in different orders.
  WorkPtr all_reduce_in_pieces(const CollectiveSignature& call, const at::Tensor& tensor) {
    const LaunchNumber number{.collective = next_number().collective, .is_of_thread = true};
    return rounds_.push(fmt::format("{} on {}", describe(call), describe(info())), [this, call, number, tensor] {
      at::AutoDispatchBelowADInplaceOrView guard;
      const int64_t numel = tensor.numel();
      const int64_t piece =
          getSize() * std::max(kGlooPieceBytes / static_cast<int64_t>(tensor.element_size()), int64_t{1});
      struct Piece {
        std::vector<at::Tensor> parts;
        GlooWorkPtr reduced;
      };
      std::deque<Piece> reducing;
      std::vector<GlooWorkPtr> gathers;
      const auto gather_first = [&] {
        rounds_.wait(reducing.front().reduced);
        const auto& parts = reducing.front().parts;
        gathers.push_back(exchange(call, number, std::vector<at::Tensor>(parts.size(), parts[getRank()]), parts));
        reducing.pop_front();
      };
      for (int64_t begin = 0; begin < numel; begin += piece) {
        auto parts = divide(flat_elements(tensor, begin, std::min(piece, numel - begin)));
        const at::Tensor own = parts[getRank()];
        auto reduced = reduce_received(call, number, parts, own, own);
        reducing.push_back({.parts = std::move(parts), .reduced = std::move(reduced)});
        if (reducing.size() == kGlooPiecesInFlight) {
          gather_first();
        }
      }
      while (!reducing.empty()) {
        gather_first();
      }
      for (const auto& gather : gathers) {
        rounds_.wait(gather);
      }
    });
  }

  /// Returns a part for each rank. All parts have the same size, except the last ones.
  std::vector<at::Tensor> divide(const at::Tensor& tensor) const {
    const int64_t numel = tensor.numel(), part = (numel + getSize() - 1) / getSize();
    std::vector<at::Tensor> parts;
    for (int64_t rank = 0; rank < getSize(); ++rank) {
      const int64_t begin = std::min(rank * part, numel);
      parts.push_back(flat_elements(tensor, begin, std::min(part, numel - begin)));
    }
    return parts;
  }

  const c10::intrusive_ptr<ProcessGroupGloo> gloo_;
  const std::shared_ptr<GlooShared> shared_;
  uint64_t collectives_ = 0;
  // Guards the following members and gloo_'s counters, because messages may use a separate thread, and pieces do. No
  // thread waits while holding it.
  std::mutex launch_mutex_;
  GlooMessages messages_;
  uint64_t launches_ = 0;
  GlooRounds rounds_;  // last, because its thread uses the others
};

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

std::shared_ptr<gloo::transport::Device> make_device(const std::string& master_addr) {
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME")) {
    return ProcessGroupGloo::createDeviceForInterface(interface);
  }
  return is_loopback(master_addr) ? ProcessGroupGloo::createDeviceForHostname(master_addr)
                                  : ProcessGroupGloo::createDefaultDevice();
}

// gloo writes with writev. If the peer has gone, that ends the process by a signal instead of returning an error.
void ignore_broken_pipes() {
  static const bool done = [] {
    struct sigaction action = {};
    if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) {
      action.sa_handler = SIG_IGN;
      sigaction(SIGPIPE, &action, nullptr);
    }
    return true;
  }();
  static_cast<void>(done);
}

class MemberDied : public CommError {
 public:
  using CommError::CommError;
};

/// Throws MemberDied if a member has died.
void look_at_members(const GlooOptions& options, const HostProcess& own) {
  for (size_t rank = 0; rank < options.processes.size(); ++rank) {
    const HostProcess& process = options.processes[rank];
    TESSERA_CHECK(MemberDied, !has_died(process, own), "connecting the ranks on {}: rank {} (pid {}) has died",
                  describe(options.info), options.info.ranks[rank], process.pid);
  }
}

/// Waits for all members, because gloo waits for a dead member until the timeout. Throws MemberDied.
void await_members(const GlooOptions& options) {
  const GroupInfo& info = options.info;
  if (options.processes.empty()) {
    return;
  }
  const auto key = [](int rank) { return fmt::format("here/{}", rank); };
  std::vector<std::string> keys;
  keys.reserve(info.ranks.size());
  for (int rank = 0; rank < info.size(); ++rank) {
    keys.push_back(key(rank));
  }
  const HostProcess own = this_process();
  options.store->set(key(info.rank), std::string());
  wait_for_keys(*options.store, keys, info.timeout, [&] { look_at_members(options, own); });
}

/// Connects on a thread, because gloo's constructor waits for a member that dies until the timeout; the thread is then
/// abandoned. Throws MemberDied, and the constructor's errors.
c10::intrusive_ptr<ProcessGroupGloo> connect_members(const GlooOptions& options) {
  constexpr std::chrono::milliseconds kLookInterval(200);
  auto gloo_options = ProcessGroupGloo::Options::create(options.info.timeout);
  gloo_options->devices.push_back(make_device(options.master_addr));
  std::packaged_task<c10::intrusive_ptr<ProcessGroupGloo>()> task(
      [store = options.store, rank = options.info.rank, size = options.info.size(), gloo_options] {
        return c10::make_intrusive<ProcessGroupGloo>(store, rank, size, gloo_options);
      });
  auto result = task.get_future();
  if (options.processes.empty()) {
    task();
    return result.get();
  }
  const HostProcess own = this_process();
  std::thread(std::move(task)).detach();
  while (result.wait_for(kLookInterval) != std::future_status::ready) {
    look_at_members(options, own);
    GlooWatch::check_waits();
  }
  return result.get();
}

void limit_silence_of(const std::map<int, std::string>& files) {
  std::vector<int> sockets;
  for (const auto& [number, what] : files) {
    if (what.starts_with("socket:")) {
      sockets.push_back(number);
    }
  }
  limit_silence(sockets);
}

/// Throws if rank 0, which serves the store, has gone. gloo reports that a connection has ended, but not whose.
void find_ended_store(const GlooOptions& options) {
  try {
    options.store->check({"here"});
  } catch (const StoreEnded& ended) {
    throw CommError(fmt::format("connecting the ranks on {}: {}", describe(options.info), ended.what()));
  } catch (const std::exception&) {  // gloo's own error is reported instead
  }
}

}  // namespace

c10::intrusive_ptr<GroupBackend> make_gloo_backend(GlooOptions options) {
  ignore_broken_pipes();
  const CloseOnExecScope scope;
  try {
    await_members(options);
    const auto before = open_files();
    auto gloo = connect_members(options);
    limit_silence_of(opened_since(before));
    return c10::make_intrusive<GlooBackend>(std::move(options.info), std::move(gloo), options.store,
                                            std::move(options.processes));
  } catch (const MemberDied&) {
    throw;
  } catch (const std::exception& failure) {
    find_ended_store(options);
    throw gloo_error("connecting the ranks", options.info, failure);
  }
}

c10::intrusive_ptr<GroupBackend> adopt_gloo_backend(GroupInfo info,
                                                    const c10::intrusive_ptr<c10d::Backend>& connections) {
  auto* const gloo = dynamic_cast<ProcessGroupGloo*>(connections.get());
  if (gloo == nullptr) {
    return {};
  }
  ignore_broken_pipes();
  const auto devices = gloo->getOptions()->devices.size();
  TESSERA_CHECK(
      NotImplementedError, devices == 1,
      "adopt_group(\"{}\"): the backend has {} network devices, between which c10d chooses by the message; it "
      "must have one, on which messages stay in order",
      info.name, devices);
  return c10::make_intrusive<GlooBackend>(std::move(info), c10::intrusive_ptr<ProcessGroupGloo>::reclaim_copy(gloo),
                                          c10::intrusive_ptr<c10d::Store>(), std::vector<HostProcess>());
}

}  // namespace tessera
