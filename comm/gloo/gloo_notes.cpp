#include "comm/gloo/gloo_notes.h"

#include <fmt/format.h>

#include <chrono>
#include <exception>
#include <thread>

#include "comm/launch/job_store.h"

namespace tessera {

std::string GlooNotes::compare(uint64_t number, const CollectiveSignature& own, const GroupInfo& info,
                               int peer) const noexcept {
  constexpr int kLooks = 25;
  constexpr std::chrono::milliseconds kPause(20);
  if (!store_) {
    return {};
  }
  try {
    const auto key = [&](int rank) { return fmt::format("called/{}/{}", number, rank); };
    store_->set(key(info.rank), describe(own));
    for (int look = 0; look < kLooks && !store_->check({key(peer)}) && find_wait_fault().empty(); ++look) {
      std::this_thread::sleep_for(kPause);
    }
    if (!store_->check({key(peer)})) {
      return {};
    }
    const std::string theirs = store_->get_to_str(key(peer));
    return theirs == describe(own) ? ""
                                   : fmt::format("; rank {} called {}", info.ranks[static_cast<size_t>(peer)], theirs);
  } catch (const std::exception&) {  // the collective's error is reported without the note
    return {};
  }
}

}  // namespace tessera
