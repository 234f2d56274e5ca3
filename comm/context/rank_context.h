#pragma once
// Determines which rank the calling thread acts as.
//
// A process that is one rank has one context for all threads. If ranks are threads of one process, each enters its own
// context, which has its default group, group names and counters. A helper thread adopts its rank's context:
//
//   RankContext context = RankContext::current();  // in the rank's thread
//   std::thread helper([context] {
//     RankContextGuard guard(context);             // the helper now acts as that rank
//     barrier(default_group());
//   });

#include <cstdint>
#include <memory>
#include <typeindex>

namespace tessera {

namespace detail {
struct RankState;
}

/// Handle to a rank's state; copies denote the same rank. Thread safety: handles may be passed to any thread; set-up
/// (init_process_group, new_group, destroy_process_group) is for one thread of a rank at a time.
class RankContext {
 public:
  /// Makes a context without a process group.
  static RankContext create();
  /// Returns the context that the calling thread entered last, or the process's.
  static RankContext current();

  bool operator==(const RankContext&) const = default;

 private:
  friend class RankContextGuard;
  explicit RankContext(std::shared_ptr<detail::RankState> state) : state_(std::move(state)) {}

  std::shared_ptr<detail::RankState> state_;
};

/// Makes the calling thread act in `context` until destruction. Guards nest.
class RankContextGuard {
 public:
  explicit RankContextGuard(const RankContext& context);
  ~RankContextGuard();
  RankContextGuard(const RankContextGuard&) = delete;
  RankContextGuard& operator=(const RankContextGuard&) = delete;

 private:
  std::shared_ptr<detail::RankState> entered_;
  detail::RankState* previous_;
};

/// Returns a number for the context and attempt of init_process_group, unique within the process; 0 before the first
/// attempt. Caches that outlive a rank must use it as a key, since ranks of one process may have equal meshes over
/// different groups. In a process that is one rank, it is the number of attempts.
///
/// All ranks must have the same number of attempts, by which they find each other and ignore leftovers of a failed
/// attempt. An attempt counts, successful or not, once the rank has its store, which over a TCPStore all ranks get or
/// none. An attempt that fails before that does not count. So after a failure on some ranks, such as a timeout, all
/// ranks make the next attempt; those on which it succeeded first call destroy_process_group().
uint64_t rank_context_id();

namespace detail {
std::shared_ptr<void> rank_local(std::type_index type, std::shared_ptr<void> (*make)());
}

/// Returns the T of the calling thread's rank, made at the first call. It is state that a process of one rank would
/// keep in a global. It lives as long as the context and its holders. Thread safety: any time; T guards itself.
template <typename T>
std::shared_ptr<T> rank_local() {
  return std::static_pointer_cast<T>(
      detail::rank_local(typeid(T), []() -> std::shared_ptr<void> { return std::make_shared<T>(); }));
}

}  // namespace tessera
