#pragma once
// Which hubs lie behind a unit's tensors, first on the ways back through the graph (backward_hooks.h).
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
struct HubPlace {
  int64_t call = -1;  // its number
  bool is_of_outputs = false;
};

struct FoundHub {
  torch::autograd::Edge edge = {};
  HubPlace place = {};
};

class HubSearch {
 public:
  /// The hub that a node leads to: the search does not go past it. None: an edge without a node.
  using HubOf = FoundHub (*)(const torch::autograd::Node&);

  explicit HubSearch(HubOf hub_of) : hub_of_(hub_of) {}

  /// Those behind the nodes `from`, for the hub at `place`. What lies behind `known`, which may be none, is left out.
  std::vector<FoundHub> find(const std::vector<torch::autograd::Edge>& from, HubPlace place, const FoundHub& known);
  /// The notes, of graphs that are over.
  void forget() { notes_.clear(); }

 private:
  struct Note {
    uint64_t sequence_nr;  // of the node: an address may be used again
    int64_t search;
  };

  HubOf hub_of_;
  std::unordered_map<const torch::autograd::Node*, Note> notes_;
};

}  // namespace tessera
