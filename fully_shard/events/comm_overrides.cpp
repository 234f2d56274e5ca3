#include "fully_shard/events/comm_overrides.h"

#include "comm/context/rank_context.h"

namespace tessera {

std::shared_ptr<CommOverrides> comm_overrides() {
  return rank_local<CommOverrides>();
}

bool is_default(const AllGatherFn& all_gather) {
  const auto* function = all_gather.target<decltype(&all_gather_async)>();
  return function && *function == &all_gather_async;
}

bool is_default(const ReduceScatterFn& reduce_scatter) {
  const auto* function = reduce_scatter.target<decltype(&reduce_scatter_async)>();
  return function && *function == &reduce_scatter_async;
}

}  // namespace tessera
