#pragma once
// For packages that can give a copy of a module what they gave the module itself.

#include <cstddef>
#include <functional>

namespace tessera {

class HookPoint;

/// While it lives, copies that this thread makes pass over hooks and state that the scope's owner will install on the
/// copy anew; HookPoint::check_cloneable still throws for any beyond those. Scopes nest; the innermost counts.
/// Thread safety: concerns the thread that made it, which must also end it.
class CloneScope {
 public:
  /// How many hooks and attached objects of a module will be renewed.
  struct Renewed {
    size_t hooks = 0;
    size_t attachments = 0;
  };
  using Count = std::function<Renewed(const HookPoint&)>;

  explicit CloneScope(Count count);
  ~CloneScope();
  CloneScope(const CloneScope&) = delete;
  CloneScope& operator=(const CloneScope&) = delete;

  /// By the innermost scope of this thread; nothing without one.
  static Renewed renewed(const HookPoint& point);

 private:
  Count count_;
  const CloneScope* outer_;
};

}  // namespace tessera
