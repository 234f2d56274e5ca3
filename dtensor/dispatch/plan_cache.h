#pragma once
// Cache of plans by call.

#include <memory>
#include <vector>

#include "dtensor/dispatch/call_signature.h"

namespace tessera {

/// Open hash table of plans, emptied when full. Since plans keep their meshes' groups, it is also emptied at the first
/// plan of another process group, and if there are too many meshes, such as in a loop that makes them. Thread safety:
/// one per thread.
class PlanCache {
 public:
  PlanCache();
  ~PlanCache();

  /// Returns the calling thread's cache. Meshes differ between ranks, which may be threads, so there are no locks.
  static PlanCache& of_thread();

  /// Keeps dropped plans valid while one is alive, since an op may call others.
  class Hold {
   public:
    explicit Hold(PlanCache& cache) : cache_(cache) { ++cache_.holds_; }
    ~Hold() {
      if (--cache_.holds_ == 0 && cache_.has_dropped_) {
        cache_.free_dropped();
      }
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    PlanCache& cache_;
  };

  /// Returns the plan of a known call, or null. Requires a Hold. Users of the plan call count_hit().
  const OpPlan* find(const CallSignature& call) const;
  void count_hit() { ++hits_; }

  /// Returns the plan of a known call, or that of `make`; stores one that cannot be cached in `uncached`.
  template <class Make>
  const OpPlan& find_or_make(const CallSignature& call, std::unique_ptr<const OpPlan>& uncached, Make&& make) {
    if (const OpPlan* plan = find(call)) {
      count_hit();
      return *plan;
    }
    ++misses_;
    std::unique_ptr<const OpPlan> made = make();
    const OpPlan& plan = *made;
    if (call.cacheable) {
      insert(call, std::move(made));
    } else {
      uncached = std::move(made);
    }
    return plan;
  }

  size_t hits() const { return hits_; }
  size_t misses() const { return misses_; }

 private:
  struct Entry;

  void insert(const CallSignature& call, std::unique_ptr<const OpPlan> plan);
  void drop_all();
  void free_dropped();
  void place(std::unique_ptr<Entry> entry);
  void make_room(uint64_t groups);
  static bool matches(const Entry& entry, const CallSignature& call);

  std::vector<std::unique_ptr<Entry>> slots_;  // size is a power of two; an entry is at its hash's index or soon after
  std::vector<std::unique_ptr<Entry>> dropped_;  // while there are holds
  bool has_dropped_ = false;
  size_t holds_ = 0;
  size_t size_ = 0;
  uint64_t context_ = 0;          // rank_context_id() of the plans
  std::vector<uint64_t> meshes_;  // groups_hash() of their meshes
  size_t hits_ = 0;
  size_t misses_ = 0;
};

}  // namespace tessera
