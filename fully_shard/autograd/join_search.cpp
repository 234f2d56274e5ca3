#include "fully_shard/autograd/join_search.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <queue>
#include <unordered_set>
#include <utility>

#include "fully_shard/autograd/boundary_nodes.h"

namespace tessera {

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

constexpr int64_t kNoSearch = -1;

/// Returns one number per join.
int64_t search_number(JoinPlace place) {
  return 2 * place.call + (place.is_of_outputs ? 1 : 0);
}

/// Adds the searches behind a join.
void add_searches(JoinPlace place, std::unordered_set<int64_t>& searches) {
  searches.insert(search_number(place));
  searches.insert(search_number({.call = place.call}));
}

struct Visit {
  const Node* node;
  int64_t last_search;  // that visited the node before
  bool operator<(const Visit& other) const { return node->sequence_nr() < other.node->sequence_nr(); }
};

}  // namespace

std::vector<const Node*> JoinSearch::find(const std::vector<Edge>& from, JoinPlace place, JoinPlace known) {
  const int64_t search = search_number(place), run = ++runs_;
  std::unordered_set<int64_t> behind_joins;
  if (known.call != -1) {
    add_searches(known, behind_joins);
  }
  std::priority_queue<Visit> visits;  // newest first, so that a join is found before the paths around it
  const auto add = [&](const Edge& edge) {
    const auto* node = edge.function.get();
    if (!node || node->num_outputs() == 0) {
      return;
    }
    const Note fresh{.sequence_nr = node->sequence_nr(), .search = kNoSearch, .run = 0};
    auto& note = notes_.try_emplace(node, fresh).first->second;
    if (note.sequence_nr != fresh.sequence_nr) {
      note = fresh;
    }
    if (note.run != run) {
      visits.push({node, std::exchange(note.search, search)});
      note.run = run;
    }
  };
  std::ranges::for_each(from, add);
  std::vector<const Node*> found;
  while (!visits.empty()) {
    const auto visit = visits.top();
    visits.pop();
    if (behind_joins.contains(visit.last_search)) {
      continue;
    }
    if (const auto* mark = first_mark(*visit.node); !mark) {
      std::ranges::for_each(visit.node->next_edges(), add);
    } else if (!behind_joins.contains(search_number(mark->side->place))) {
      add_searches(mark->side->place, behind_joins);
      found.push_back(visit.node);
    }
  }
  return found;
}

}  // namespace tessera
