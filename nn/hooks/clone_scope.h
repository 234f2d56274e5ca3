#pragma once
// Lets packages that attach hooks to modules attach them to copies again.

#include <cstddef>
#include <functional>

namespace tessera {

class HookPoint;

/// Allows this thread, while it lives, to clone modules whose hooks and state the scope's owner will attach again.
/// HookPoint::check_cloneable still throws for others. Scopes nest; the innermost one counts. Thread safety: a scope
/// must end in the thread that made it.
class CloneScope {
 public:
  /// Numbers of a module's hooks and attached objects that will be attached again.
  struct Renewed {
    size_t hooks = 0;
    size_t attachments = 0;
  };
  using Count = std::function<Renewed(const HookPoint&)>;

  explicit CloneScope(Count count);
  ~CloneScope();
  CloneScope(const CloneScope&) = delete;
  CloneScope& operator=(const CloneScope&) = delete;

  static Renewed renewed(const HookPoint& point);  // by this thread's innermost scope; zeros without one

 private:
  Count count_;
  const CloneScope* outer_;
};

}  // namespace tessera
