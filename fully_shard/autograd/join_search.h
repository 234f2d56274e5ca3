#pragma once
// JoinSearch: which joins lie behind a unit's tensors, first on the ways back through the graph (autograd_boundary.h).
//
// What the search for a join walked lies behind that join, so a search that finds it need not walk there again. With a
// note on each node of the last search that came by, the searches of a forward are as long as its graph, in all, also
// where ways lead around units, as residual sums do.

#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace tessera {

/// The inputs or the outputs of a call of a unit. What is behind the inputs is behind the outputs too.
struct JoinPlace {
  int64_t call = -1;  // its number; -1: none
  bool is_of_outputs = false;
};

class JoinSearch {
 public:
  /// Returns the boundary nodes behind `from`, one a place, for the join at `place`, without those behind `known`.
  std::vector<const torch::autograd::Node*> find(const std::vector<torch::autograd::Edge>& from, JoinPlace place,
                                                 JoinPlace known);
  /// Forgets the notes, of graphs that are over.
  void forget() { notes_.clear(); }

 private:
  struct Note {
    uint64_t sequence_nr;  // of the node: an address may be used again
    int64_t search;        // one for each join, which may be made again
    int64_t run;
  };

  std::unordered_map<const torch::autograd::Node*, Note> notes_;
  int64_t runs_ = 0;
};

}  // namespace tessera
