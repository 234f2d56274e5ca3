#pragma once
// Messages between two ranks over gloo, in the order of their sends.
//
// gloo matches messages by sender and tag, in order, and moves bytes once both ends have asked for them. It ends the
// process if more bytes arrive than expected, and does not notice fewer. So no bytes move before both ends agree on
// their number:
//
//   sender                      tag                         receiver
//   its signature          →    kHeaderOfSender        →
//                          ←    kHeaderOfReceiver      ←    its signature
//   the bytes, in pieces   →    kPieces + piece bytes  →
//
// All of this is requested at launch, so messages move while no rank waits for them. Pieces of different sizes have
// different tags and do not match. wait() compares the headers of its message and of earlier ones. A message dropped
// without wait() keeps its tensor until a later one in this direction was waited for.

#include <map>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backend/collective_call.h"
#include "comm/backend/group_backend.h"
#include "comm/gloo/gloo_work.h"

namespace tessera {

/// First tag of messages; a group's collectives use lower ones.
constexpr int kGlooMessageTags = 1 << 30;
/// Tag of GlooWatch's probes, which no rank sends to.
constexpr int kGlooProbeTag = (kGlooMessageTags | (1 << 29)) + 2;

/// Sends and receives one rank's messages. Works may outlive it. After a mismatch, all later messages in that direction
/// fail. Thread safety: one thread at a time.
class GlooMessages {
 public:
  GlooMessages(std::shared_ptr<const GroupInfo> info, std::shared_ptr<GlooShared> shared,
               c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo);
  ~GlooMessages();

  /// Launches a Send or Recv to or from call.root. Throws CommError.
  c10::intrusive_ptr<c10d::Work> launch(const CollectiveCall& call);

 private:
  class Channel;
  class MessageWork;

  const std::shared_ptr<const GroupInfo> info_;
  const std::shared_ptr<GlooShared> shared_;
  const c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  std::map<RankPair, std::shared_ptr<Channel>> ways_;
};

}  // namespace tessera
