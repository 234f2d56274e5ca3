#pragma once
// Which rank the calling thread acts as.
//
// A process that is one rank has one context, which all of its threads share. Where ranks are threads of one process,
// each of them enters a context of its own, and the default group, the names of groups and the counters that belong
// to the rank are found through it. A thread that works for a rank (a loader, an autograd thread of a device) adopts
// the rank's context:
//
//   RankContext context = RankContext::current();               // in the rank's thread
//   std::thread helper([context] {
//     RankContextGuard guard(context);                          // the helper now acts as that rank
//     barrier(default_group());
//   });

#include <cstdint>
#include <memory>
#include <typeindex>

namespace tessera {

namespace detail {
struct RankState;
}

/// A handle to a rank's state: a cheap value, copies mean the same rank. Thread safety: a handle may be passed to any
/// thread; set-up (init_process_group, new_group, destroy_process_group) is for one thread of a rank at a time.
class RankContext {
 public:
  /// A context of its own, without a process group yet.
  static RankContext create();
  /// The context that the calling thread acts in: the one that it entered last, else the process's.
  static RankContext current();

  bool operator==(const RankContext&) const = default;

 private:
  friend class RankContextGuard;
  explicit RankContext(std::shared_ptr<detail::RankState> state) : state_(std::move(state)) {}

  std::shared_ptr<detail::RankState> state_;
};

/// Makes the calling thread act in `context` until the guard's end; guards nest.
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

/// A number for (context, attempt of init_process_group) that is never used twice in a process; 0 before the first one.
/// A cache that outlives a rank must have it in its key, since ranks of one process may hold equal meshes over
/// different groups. In a process that is one rank it is the count of attempts.
///
/// That count must be the same on all ranks: by it they find each other, and keep apart from what is left of an attempt
/// that failed. An attempt counts, however it ends, once the rank has its store, which over a TCPStore all ranks get or
/// none. One that is refused before, for the rank's own options or since rank 0 cannot be reached, has met nobody and
/// does not count. So after an attempt that failed on some ranks, by a time-out say, all of them make the next one;
/// those on which it did not fail call destroy_process_group() first.
uint64_t rank_context_id();

namespace detail {
std::shared_ptr<void> rank_local(std::type_index type, std::shared_ptr<void> (*make)());
}

/// The calling thread's rank's own T, made at the first call: state that a process of one rank would keep in a global.
/// It lives as long as the context and whoever holds it. Thread safety: may be called at any time; T guards itself.
template <typename T>
std::shared_ptr<T> rank_local() {
  return std::static_pointer_cast<T>(
      detail::rank_local(typeid(T), []() -> std::shared_ptr<void> { return std::make_shared<T>(); }));
}

}  // namespace tessera
