#include "comm/context/collective.h"

namespace tessera {

std::string_view name(Collective collective) {
  constexpr std::string_view names[kCollectiveCount] = {
      "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all",
      "scatter",    "gather",         "barrier",    "send",      "recv"};
  return names[static_cast<size_t>(collective)];
}

}  // namespace tessera
