#pragma once
// Counts a rank's collectives by module, op and kind, like torch/distributed/tensor/debug/_comm_mode.py.
//
//   CommDebugMode mode(*model);
//   model(x).sum().backward();
//   fmt::print("{}", mode.to_string());
//     module   phase     op               collective      calls   bytes sent
//     up       forward   -                all_gather          1           48
//     -        backward  aten::mm         all_reduce          1           24
//
// The op "-" means that fully_shard or redistribute() itself communicated.

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

/// Scope that counts collectives, except those of background checkpoint saves. Scopes nest; only the innermost counts.
/// Calls from a module without a hook point are attributed to its caller. Thread safety: for the rank's thread.
class CommDebugMode : public CommObserver {
 public:
  struct Key {
    std::string module;  // name below the given module; "" outside of all
    bool backward = false;
    std::string op;  // DTensor op that redistributed its operands; "" if none
    Collective collective = Collective::AllGather;
    auto operator<=>(const Key&) const = default;
  };

  CommDebugMode() : scope_(*this) {}
  explicit CommDebugMode(ModuleRef module);  // `module` must outlive the mode
  CommDebugMode(const CommDebugMode&) = delete;
  CommDebugMode& operator=(const CommDebugMode&) = delete;

  const std::map<Key, CommStats::Entry>& entries() const { return entries_; }
  int64_t calls() const;
  int64_t calls(Collective collective) const;
  int64_t bytes_sent() const;
  void reset() { entries_.clear(); }

  std::string to_string() const;  // a table with a line per entry and a total

  void on_collective(Collective kind, int64_t bytes_sent) override;

 private:
  std::map<Key, CommStats::Entry> entries_;
  std::vector<std::string> running_;  // modules whose forward is running, innermost last
  std::vector<ScopedHook> hooks_;
  CommObserverScope scope_;
};

}  // namespace tessera
