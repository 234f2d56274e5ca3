#pragma once
// JoinSearch: finds the nearest joins behind a unit's tensors in the graph (autograd_boundary.h).
//
// Everything that the search for a join has walked is behind that join, so a search that finds it need not walk there
// again. Each node keeps a note of the last search that visited it. In total, the searches of a forward are therefore
// linear in its graph, even if paths lead around units, as residual sums do.

#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace tessera {

/// Inputs or outputs of a unit's call. Everything behind the inputs is also behind the outputs.
struct JoinPlace {
  int64_t call = -1;  // number of the call; -1: none
  bool is_of_outputs = false;
};

class JoinSearch {
 public:
  /// Returns the boundary nodes behind `from`, one per place, for the join at `place`, except those behind `known`.
  std::vector<const torch::autograd::Node*> find(const std::vector<torch::autograd::Edge>& from, JoinPlace place,
                                                 JoinPlace known);
  /// Drops the notes, once their graphs are no longer used.
  void forget() { notes_.clear(); }

 private:
  struct Note {
    uint64_t sequence_nr;  // of the node, because an address may be reused
    int64_t search;        // number of the search; each join has one, and may be made again
    int64_t run;
  };

  std::unordered_map<const torch::autograd::Node*, Note> notes_;
  int64_t runs_ = 0;
};

}  // namespace tessera
