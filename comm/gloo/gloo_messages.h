#pragma once
// Messages between two ranks over gloo, in the order of their sends.
//
// gloo delivers by sender and tag, in order, and starts to move bytes once both ends have asked for it. It ends the
// process where more bytes come than are expected, and does not notice where fewer come. So no bytes move before both
// ends agree on their number:
//
//   sender                      tag                         receiver
//   what it sends          →    kHeaderOfSender        →
//                          ←    kHeaderOfReceiver      ←    what it expects
//   the bytes, in pieces   →    kPieces + piece bytes  →
//
// All of that is asked for at once, at launch, so that messages move while nobody waits for them. Pieces of different
// sizes do not meet, as their tags differ. A wait compares the two headers, also those of the messages before, which
// are done with it: one that is dropped without wait() keeps its tensor until a later one on its way was waited for.

#include <map>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backend/collective_call.h"
#include "comm/backend/group_backend.h"

namespace tessera {

/// Tags from here on are taken; the group's collectives have those below.
constexpr int kGlooMessageTags = 1 << 30;

/// One rank's messages with all others. Works may outlive it. After one whose ends did not fit, all later messages on
/// its way fail. Thread safety: for one thread at a time.
class GlooMessages {
 public:
  GlooMessages(std::shared_ptr<const GroupInfo> info, c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo);
  ~GlooMessages();

  /// Launches a Send or a Recv, to or from call.root. Throws CommError.
  c10::intrusive_ptr<c10d::Work> launch(const CollectiveCall& call);

 private:
  class Channel;
  class MessageWork;

  const std::shared_ptr<const GroupInfo> info_;
  const c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  std::map<RankPair, std::shared_ptr<Channel>> ways_;
};

}  // namespace tessera
