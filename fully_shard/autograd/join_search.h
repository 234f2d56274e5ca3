#pragma once
// Which hubs lie behind a unit's tensors, first on the ways back through the graph (autograd_boundary.h).
//
// Each search would walk as far as a way around the units leads, as that of residual sums does:
//
//   h1 = h0 + a(h0);  h2 = h1 + b(h1)       b's input leads to a's hub, and past it to h0
//
// But what the search for a hub walked lies behind that hub. So one that has found it need not walk there again: with
// a note on each node of the last search that came by, the searches of such a forward are as long as its graph, in all.
//
// Thread safety: for the thread that runs the rank's forward.

#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace tessera {

/// Of the inputs, or of the outputs, of a call of a unit. What is behind the inputs is behind the outputs too.
struct JoinPlace {
  int64_t call = -1;  // its number; -1: none
  bool is_of_outputs = false;
};

class JoinSearch {
 public:
  /// The border nodes behind the nodes `from`, one a place, for the hub at `place`. What lies behind the hub at `known`
  /// is left out.
  std::vector<const torch::autograd::Node*> find(const std::vector<torch::autograd::Edge>& from, JoinPlace place,
                                                 JoinPlace known);
  /// The notes, of graphs that are over.
  void forget() { notes_.clear(); }

 private:
  struct Note {
    uint64_t sequence_nr;  // of the node: an address may be used again
    int64_t search;        // one for each hub, which may be made again
    int64_t run;
  };

  std::unordered_map<const torch::autograd::Node*, Note> notes_;
  int64_t runs_ = 0;
};

}  // namespace tessera
