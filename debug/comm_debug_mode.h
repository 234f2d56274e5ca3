#pragma once
// Counts the collectives of a rank by module, op and kind while it lives.
//
//   CommDebugMode mode(*model);
//   model(x).sum().backward();
//   fmt::print("{}", mode.to_string());
//     module   phase     op               collective      calls   bytes sent
//     up       forward   -                all_gather          1           48
//     -        backward  aten::mm         all_reduce          1           24
//     total                                                   2           72
//
// op: the op on DTensors that moved its operands; "-" for what fully_shard and redistribute() issue themselves. What a
// checkpoint saves in the background is not counted.
// After torch/distributed/tensor/debug/_comm_mode.py.

#include <torch/nn/module.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "comm/context/comm_observer.h"
#include "comm/context/comm_stats.h"
#include "nn/hooks/hook_point.h"
#include "nn/hooks/module_ref.h"

namespace tessera {

/// Scopes nest; the innermost counts. Modules without a hook point are not told from the one that calls them.
/// Thread safety: for the rank's thread; make and end it there.
class CommDebugMode : public CommObserver {
 public:
  struct Key {
    std::string module;  // name below the module given, "" outside of all
    bool backward = false;
    std::string op;  // "" if none
    Collective collective = Collective::AllGather;
    auto operator<=>(const Key&) const = default;
  };

  CommDebugMode() : scope_(*this) {}
  /// `module` must outlive the mode.
  explicit CommDebugMode(ModuleRef module);
  CommDebugMode(const CommDebugMode&) = delete;
  CommDebugMode& operator=(const CommDebugMode&) = delete;

  const std::map<Key, CommStats::Entry>& entries() const { return entries_; }
  int64_t calls() const;
  int64_t calls(Collective collective) const;
  int64_t bytes_sent() const;
  void reset() { entries_.clear(); }

  /// A table with a line an entry and a total.
  std::string to_string() const;

  void on_collective(Collective kind, int64_t bytes_sent) override;

 private:
  std::map<Key, CommStats::Entry> entries_;
  std::vector<std::string> running_;  // names of the modules whose forward runs, innermost last
  std::vector<ScopedHook> hooks_;
  CommObserverScope scope_;
};

}  // namespace tessera
