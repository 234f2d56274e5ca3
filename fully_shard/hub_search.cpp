#include "fully_shard/hub_search.h"

#include <torch/csrc/autograd/function.h>

#include <queue>
#include <unordered_set>

namespace tessera {

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

constexpr int64_t kNoSearch = -1;

/// One for each hub.
int64_t search_of(HubPlace place) {
  return 2 * place.call + (place.is_of_outputs ? 1 : 0);
}

/// The searches behind a hub.
void add_searches(HubPlace place, std::unordered_set<int64_t>& searches) {
  searches.insert(search_of(place));
  searches.insert(search_of({.call = place.call}));
}

struct Visit {
  const Node* node;
  int64_t last_search;  // that came by before
  bool operator<(const Visit& other) const { return node->sequence_nr() < other.node->sequence_nr(); }
};

}  // namespace

std::vector<FoundHub> HubSearch::find(const std::vector<torch::autograd::Edge>& from, HubPlace place,
                                      const FoundHub& known) {
  const int64_t search = search_of(place);
  std::unordered_set<int64_t> behind_hubs;
  if (known.edge.function) {
    add_searches(known.place, behind_hubs);
  }
  std::priority_queue<Visit> visits;  // the newest first, so that a hub is found before the ways around it
  const auto add = [&](const Edge& edge) {
    const auto* node = edge.function.get();
    if (!node || node->num_outputs() == 0) {
      return;
    }
    auto& note = notes_.try_emplace(node, Note{node->sequence_nr(), kNoSearch}).first->second;
    if (note.sequence_nr != node->sequence_nr()) {
      note = {node->sequence_nr(), kNoSearch};
    }
    if (note.search != search) {
      visits.push({node, std::exchange(note.search, search)});
    }
  };
  std::ranges::for_each(from, add);
  std::vector<FoundHub> hubs;
  while (!visits.empty()) {
    const auto visit = visits.top();
    visits.pop();
    if (behind_hubs.contains(visit.last_search)) {
      continue;
    }
    if (auto hub = hub_of_(*visit.node); !hub.edge.function) {
      std::ranges::for_each(visit.node->next_edges(), add);
    } else if (!behind_hubs.contains(search_of(hub.place))) {
      add_searches(hub.place, behind_hubs);
      hubs.push_back(std::move(hub));
    }
  }
  return hubs;
}

}  // namespace tessera
