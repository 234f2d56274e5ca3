#include "comm/gloo/gloo_messages.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/backend/backend_checks.h"
#include "comm/gloo/gloo_error.h"

namespace tessera {

namespace {

using c10d::ProcessGroupGloo;

// A tag has 31 bits. Pieces are small enough that the number of their bytes fits into it.
constexpr int kPieces = kGlooMessageTags;
constexpr int64_t kPieceBytes = int64_t{1} << 28;
constexpr int kHeaderOfSender = kGlooMessageTags | (1 << 29);
constexpr int kHeaderOfReceiver = kHeaderOfSender + 1;

/// Returns the properties on which both ends must agree, in order.
at::Tensor make_header(const CollectiveSignature& shape) {
  at::Tensor header = at::empty({3}, at::kLong);
  auto* const entries = header.mutable_data_ptr<int64_t>();
  entries[0] = std::max(shape.input, shape.output);
  entries[1] = static_cast<int64_t>(shape.dtype);
  entries[2] = shape.tag;
  return header;
}

/// Returns the call of the rank at the other end, from its header.
CollectiveSignature read_header(const at::Tensor& header, const CollectiveSignature& own, int own_rank) {
  const auto* const entries = header.const_data_ptr<int64_t>();
  CollectiveSignature peer = {
      .root = own_rank, .tag = static_cast<int>(entries[2]), .dtype = static_cast<c10::ScalarType>(entries[1])};
  const bool sends = own.kind == Collective::Recv;
  peer.kind = sends ? Collective::Send : Collective::Recv;
  (sends ? peer.input : peer.output) = entries[0];
  return peer;
}

WorkPtr start(ProcessGroupGloo& gloo, bool sends, const at::Tensor& tensor, int peer, int tag) {
  std::vector<at::Tensor> one = {tensor};
  return sends ? gloo.send(one, peer, tag) : gloo.recv(one, peer, tag);
}

}  // namespace

/// Messages from one rank to another; this rank is one of them.
class GlooMessages::Channel {
 public:
  Channel(std::shared_ptr<const GroupInfo> info, std::shared_ptr<GlooShared> shared,
          c10::intrusive_ptr<ProcessGroupGloo> gloo)
      : info_(std::move(info)), shared_(std::move(shared)), gloo_(std::move(gloo)) {}

  /// Returns the message's number, counted from 0.
  uint64_t launch(const CollectiveCall& call);
  void wait(uint64_t number, std::chrono::milliseconds timeout);
  bool is_done(uint64_t number) const { return number < first_open_; }

 private:
  struct Message {
    CollectiveSignature shape;
    at::Tensor peer_header;
    WorkPtr peer_header_here = {};
    std::vector<WorkPtr> others = {};  // this rank's header, and the pieces
    bool is_agreed = false;
  };

  void agree(Message& message, std::chrono::milliseconds timeout);
  [[noreturn]] void raise(const Message& message, const std::string& reason) const;
  [[noreturn]] void raise_failure(const Message& message, const std::exception& failure) const;

  const std::shared_ptr<const GroupInfo> info_;
  const std::shared_ptr<GlooShared> shared_;
  const c10::intrusive_ptr<ProcessGroupGloo> gloo_;
  // All messages that may be incomplete. A failed one is included, because gloo may still write to its tensor.
  std::deque<Message> open_;
  uint64_t first_open_ = 0;
  std::string mismatch_;
};

uint64_t GlooMessages::Channel::launch(const CollectiveCall& call) {
  const bool sends = call.kind == Collective::Send;
  Message message{.shape = make_signature(call), .peer_header = at::empty({3}, at::kLong)};
  if (!mismatch_.empty()) {
    raise(message, mismatch_);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor bytes = flat_bytes(sends ? call.input : call.output);
  try {
    message.peer_header_here =
        start(*gloo_, false, message.peer_header, call.root, sends ? kHeaderOfReceiver : kHeaderOfSender);
    message.others.push_back(
        start(*gloo_, true, make_header(message.shape), call.root, sends ? kHeaderOfSender : kHeaderOfReceiver));
    for (int64_t begin = 0; begin < bytes.numel(); begin += kPieceBytes) {
      const int64_t count = std::min(kPieceBytes, bytes.numel() - begin);
      message.others.push_back(
          start(*gloo_, sends, bytes.narrow(0, begin, count), call.root, kPieces + static_cast<int>(count)));
    }
  } catch (const std::exception& failure) {
    raise_failure(message, failure);
  }
  open_.push_back(std::move(message));
  return first_open_ + open_.size() - 1;
}

void GlooMessages::Channel::wait(uint64_t number, std::chrono::milliseconds timeout) {
  if (is_done(number)) {
    return;
  }
  Message& message = open_[number - first_open_];
  timeout = resolve_timeout(timeout, *info_);
  try {
    // Also checks earlier messages: bytes of this one may have gone to one of them if its ends did not match.
    for (uint64_t i = first_open_; i <= number && mismatch_.empty(); ++i) {
      agree(open_[i - first_open_], timeout);
    }
    for (size_t i = 0; i < message.others.size() && mismatch_.empty(); ++i) {
      shared_->watch.wait_for(*message.others[i], message.shape.root, timeout);
    }
  } catch (const std::exception& failure) {
    raise_failure(message, failure);
  }
  if (!mismatch_.empty()) {
    raise(message, mismatch_);
  }
  // A connection moves bytes in the order of launches, so earlier messages are done too, including dropped ones.
  for (; first_open_ <= number; ++first_open_) {
    open_.pop_front();
  }
}

void GlooMessages::Channel::agree(Message& message, std::chrono::milliseconds timeout) {
  if (message.is_agreed) {
    return;
  }
  shared_->watch.wait_for(*message.peer_header_here, message.shape.root, timeout);
  const CollectiveSignature peer = read_header(message.peer_header, message.shape, info_->rank);
  const bool sends = message.shape.kind == Collective::Send;
  mismatch_ = sends ? find_mismatch({message.shape, peer}) : find_mismatch({peer, message.shape});
  message.is_agreed = mismatch_.empty();
}

void GlooMessages::Channel::raise(const Message& message, const std::string& reason) const {
  throw CommError(fmt::format("{} on {}: {}", describe(message.shape), describe(*info_), reason));
}

void GlooMessages::Channel::raise_failure(const Message& message, const std::exception& failure) const {
  const int peer = message.shape.root;
  shared_->watch.check_members(describe(message.shape), *info_, peer);
  throw gloo_error(describe(message.shape), *info_, failure, peer);
}

class GlooMessages::MessageWork final : public c10d::Work {
 public:
  MessageWork(std::shared_ptr<Channel> way, uint64_t number) : way_(std::move(way)), number_(number) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    way_->wait(number_, timeout);
    return true;
  }
  bool isCompleted() override { return way_->is_done(number_); }
  bool isSuccess() const override { return way_->is_done(number_); }

 private:
  const std::shared_ptr<Channel> way_;
  const uint64_t number_;
};

GlooMessages::GlooMessages(std::shared_ptr<const GroupInfo> info, std::shared_ptr<GlooShared> shared,
                           c10::intrusive_ptr<ProcessGroupGloo> gloo)
    : info_(std::move(info)), shared_(std::move(shared)), gloo_(std::move(gloo)) {}

GlooMessages::~GlooMessages() = default;

WorkPtr GlooMessages::launch(const CollectiveCall& call) {
  const bool sends = call.kind == Collective::Send;
  const RankPair pair{.from = sends ? info_->rank : call.root, .to = sends ? call.root : info_->rank};
  std::shared_ptr<Channel>& way = ways_[pair];
  if (!way) {
    way = std::make_shared<Channel>(info_, shared_, gloo_);
  }
  return c10::make_intrusive<MessageWork>(way, way->launch(call));
}

}  // namespace tessera
