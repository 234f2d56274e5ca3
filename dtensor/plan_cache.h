#pragma once
// Plans of calls that were seen before.

#include <memory>
#include <vector>

#include "dtensor/call_signature.h"

namespace tessera {

/// Plans by call: an open hash table that is emptied when full, and at the first plan of another process group: plans
/// keep the groups of their meshes. Not thread-safe: one a thread.
class PlanCache {
 public:
  PlanCache();
  ~PlanCache();

  template <class Make>
  std::shared_ptr<const OpPlan> find_or_make(const CallSignature& call, Make&& make) {
    if (auto found = find(call)) {
      ++hits_;
      return found;
    }
    ++misses_;
    auto plan = make();
    if (call.cacheable) {
      insert(call, plan);
    }
    return plan;
  }

  size_t hits() const { return hits_; }
  size_t misses() const { return misses_; }

 private:
  struct Entry;

  std::shared_ptr<const OpPlan> find(const CallSignature& call) const;
  void insert(const CallSignature& call, std::shared_ptr<const OpPlan> plan);
  void place(std::unique_ptr<Entry> entry);
  void grow();
  static bool matches(const Entry& entry, const CallSignature& call);

  std::vector<std::unique_ptr<Entry>> slots_;  // a power of two; an entry is at its hash's place or soon after
  size_t size_ = 0;
  uint64_t context_ = 0;  // the rank_context_id() of the plans
  size_t hits_ = 0;
  size_t misses_ = 0;
};

}  // namespace tessera
