#include "comm/context/comm_observer.h"

#include <utility>

#include "comm/context/rank_state.h"

namespace tessera {

CommObserverScope::CommObserverScope(CommObserver& observer)
    : previous_(detail::rank_state().observer.exchange(&observer)) {}

CommObserverScope::~CommObserverScope() {
  detail::rank_state().observer.store(previous_);
}

UnobservedScope::UnobservedScope() : previous_(std::exchange(detail::is_unobserved, true)) {}

UnobservedScope::~UnobservedScope() {
  detail::is_unobserved = previous_;
}

}  // namespace tessera
