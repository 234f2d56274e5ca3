#pragma once
// Plans of calls that were seen before.

#include <memory>
#include <vector>

#include "dtensor/dispatch/call_signature.h"

namespace tessera {

/// Plans by call: an open hash table that is emptied when full, and, since plans keep the groups of their meshes, at
/// the first plan of another process group, and of one mesh too many, as of a program that makes meshes in a loop. Not
/// thread-safe: one a thread.
class PlanCache {
 public:
  PlanCache();
  ~PlanCache();

  /// The calling thread's. Meshes differ between ranks, and ranks may be threads: so there are no locks.
  static PlanCache& of_thread();

  /// Plans that the cache drops stay valid while one is alive: an op may call others as it runs.
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

  /// The plan of a call that was seen before, or null. Needs a Hold. Who uses it calls count_hit().
  const OpPlan* find(const CallSignature& call) const;
  void count_hit() { ++hits_; }

  /// The same, or what `make` returns; one that cannot be cached is put into `uncached`.
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

  std::vector<std::unique_ptr<Entry>> slots_;    // a power of two; an entry is at its hash's place or soon after
  std::vector<std::unique_ptr<Entry>> dropped_;  // while there are holds
  bool has_dropped_ = false;
  size_t holds_ = 0;
  size_t size_ = 0;
  uint64_t context_ = 0;          // the rank_context_id() of the plans
  std::vector<uint64_t> meshes_;  // the groups_hash() of each of theirs
  size_t hits_ = 0;
  size_t misses_ = 0;
};

}  // namespace tessera
