#include "nn/hooks/clone_scope.h"

#include <utility>

namespace tessera {

namespace {

thread_local const CloneScope* innermost = nullptr;

}  // namespace

CloneScope::CloneScope(Count count) : count_(std::move(count)), outer_(std::exchange(innermost, this)) {}

CloneScope::~CloneScope() {
  innermost = outer_;
}

CloneScope::Renewed CloneScope::renewed(const HookPoint& point) {
  return innermost ? innermost->count_(point) : Renewed{};
}

}  // namespace tessera
