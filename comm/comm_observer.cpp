#include "comm/comm_observer.h"

#include "comm/rank_state.h"

namespace tessera {

CommObserverScope::CommObserverScope(CommObserver& observer)
    : previous_(detail::rank_state().observer.exchange(&observer)) {}

CommObserverScope::~CommObserverScope() {
  detail::rank_state().observer.store(previous_);
}

}  // namespace tessera
