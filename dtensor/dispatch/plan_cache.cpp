#include "dtensor/dispatch/plan_cache.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "comm/context/rank_context.h"

namespace tessera {

namespace {

/// Limit beyond which all plans are dropped, because programs with ever-changing sizes must not grow forever.
constexpr size_t kMaxCachedPlans = 1 << 16;

/// Limit of meshes, including sub-meshes, because each of their groups may hold a socket for each peer.
constexpr size_t kMaxMeshes = 64;

/// Returns whether the argument is a Tensor?[]. Its undefined entries are not operands, so its length is part of the
/// key.
bool is_list_of_optional(const CallSignature& call, size_t arg) {
  return call.info->kinds[arg] == OpInfo::ArgKind::TensorList && call.args[arg].isList() &&
         !call.args[arg].isTensorList();
}

int64_t list_size(const CallSignature& call, size_t arg) {
  return std::ssize(call.args[arg].toListRef());
}

}  // namespace

/// Owned form of the key, to distinguish calls with equal hashes.
struct PlanCache::Entry {
  struct Operand {
    size_t arg;
    size_t index;
    SpecPtr spec;  // null: a plain scalar, whose key is in `scalars`
  };
  uint64_t hash;
  const OpInfo* info;
  at::ScalarType default_dtype;
  c10::SmallVector<Operand, 3> operands;
  std::vector<c10::IValue>
      scalars;  // keys of plain scalars, then all arguments without tensors and lengths of Tensor?[]
  std::unique_ptr<const OpPlan> plan;
};

PlanCache::PlanCache() = default;
PlanCache::~PlanCache() = default;

PlanCache& PlanCache::of_thread() {
  thread_local PlanCache cache;
  return cache;
}

bool PlanCache::matches(const Entry& entry, const CallSignature& call) {
  if (entry.info != call.info || entry.default_dtype != call.default_dtype ||
      entry.operands.size() != call.operands.size()) {
    return false;
  }
  size_t scalar = 0;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const auto& operand = call.operands[i];
    const auto& key = entry.operands[i];
    if (key.arg != operand.arg || key.index != operand.index || (key.spec != nullptr) != (operand.dtensor != nullptr)) {
      return false;
    }
    if (key.spec && !same_spec_and_groups(key.spec, operand.dtensor->spec)) {
      return false;
    }
    if (!key.spec && entry.scalars[scalar++].toInt() != scalar_tensor_key(*operand.tensor)) {
      return false;
    }
  }
  for (size_t arg = 0; arg < call.args.size(); ++arg) {
    if (is_scalar_argument(call, arg)) {
      if (!same_scalar(entry.scalars[scalar++], call.args[arg], call.info->reads_float_scalars)) {
        return false;
      }
    } else if (is_list_of_optional(call, arg) && entry.scalars[scalar++].toInt() != list_size(call, arg)) {
      return false;
    }
  }
  return true;
}

const OpPlan* PlanCache::find(const CallSignature& call) const {
  if (!call.cacheable || slots_.empty()) {
    return nullptr;
  }
  for (size_t place = call.hash;; ++place) {
    const auto& entry = slots_[place & (slots_.size() - 1)];
    if (!entry) {
      return nullptr;
    }
    if (entry->hash == call.hash && matches(*entry, call)) {
      return entry->plan.get();
    }
  }
}

void PlanCache::place(std::unique_ptr<Entry> entry) {
  size_t place = entry->hash;
  while (slots_[place & (slots_.size() - 1)]) {
    ++place;
  }
  slots_[place & (slots_.size() - 1)] = std::move(entry);
}

void PlanCache::drop_all() {
  if (holds_ > 0) {
    std::move(slots_.begin(), slots_.end(), std::back_inserter(dropped_));
    has_dropped_ = true;
  }
  slots_.clear();
  size_ = 0;
  meshes_.clear();
}

void PlanCache::free_dropped() {
  has_dropped_ = false;
  const auto dropped = std::exchange(dropped_, {});  // plans may free groups
}

/// Makes room for one more plan, of a mesh with this groups_hash(), so that at least half of the table stays empty.
void PlanCache::make_room(uint64_t groups) {
  const auto is_known = [&] { return std::ranges::find(meshes_, groups) != meshes_.end(); };
  if (size_ >= kMaxCachedPlans || (meshes_.size() >= kMaxMeshes && !is_known())) {
    drop_all();
  }
  if (!is_known()) {
    meshes_.push_back(groups);
  }
  if (slots_.size() < 2 * (size_ + 1)) {
    auto old = std::exchange(slots_, {});
    slots_.resize(std::max<size_t>(64, 2 * old.size()));
    for (auto& entry : old) {
      if (entry) {
        place(std::move(entry));
      }
    }
  }
}

void PlanCache::insert(const CallSignature& call, std::unique_ptr<const OpPlan> plan) {
  auto entry = std::make_unique<Entry>();
  entry->hash = call.hash;
  entry->info = call.info;
  entry->default_dtype = call.default_dtype;
  entry->plan = std::move(plan);
  for (const auto& operand : call.operands) {
    entry->operands.push_back({operand.arg, operand.index, operand.dtensor ? operand.dtensor->spec : SpecPtr()});
    if (!operand.dtensor) {
      entry->scalars.emplace_back(scalar_tensor_key(*operand.tensor));
    }
  }
  for (size_t arg = 0; arg < call.args.size(); ++arg) {
    if (is_scalar_argument(call, arg)) {
      entry->scalars.push_back(call.args[arg]);
    } else if (is_list_of_optional(call, arg)) {
      entry->scalars.emplace_back(list_size(call, arg));
    }
  }
  if (const uint64_t context = rank_context_id(); context != context_) {
    drop_all();
    context_ = context;
  }
  const auto dtensor = std::ranges::find_if(call.operands, [](const auto& operand) { return operand.dtensor; });
  make_room(dtensor->dtensor->spec->mesh().groups_hash());
  place(std::move(entry));
  ++size_;
}

}  // namespace tessera
