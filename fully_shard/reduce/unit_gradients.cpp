#include "fully_shard/reduce/unit_gradients.h"

#include <algorithm>

#include "base/error.h"
#include "comm/shm/shared_memory.h"

namespace tessera {

std::vector<size_t> cut_by_bytes(const std::vector<int64_t>& bytes, int64_t cap) {
  std::vector<size_t> counts;
  int64_t limit = std::min(cap, kFirstBucketBytes);
  int64_t filled = 0;
  size_t count = 0;
  for (auto next = bytes.rbegin(); next != bytes.rend(); ++next) {
    if (count > 0 && filled + *next > limit) {
      counts.push_back(std::exchange(count, 0));
      filled = 0;
      limit = cap;
    }
    filled += *next;
    ++count;
  }
  if (count > 0) {
    counts.push_back(count);
  }
  return counts;
}

UnitGradients::UnitGradients(UnitParams& params, UnitContextPtr context, int64_t bucket_bytes)
    : params_(params), context_(std::move(context)), bucket_bytes_(bucket_bytes) {
  cut({params_.all().size()});
}

/// Splits parameters into buckets of these lengths, starting at the last parameter.
void UnitGradients::cut(const std::vector<size_t>& counts) {
  if (std::ranges::equal(buckets_, counts, {}, &Bucket::count)) {
    return;
  }
  buckets_.clear();
  const auto params = params_.all();
  size_t first = params.size();
  for (const auto count : counts) {
    TESSERA_ASSERT(count <= first, "buckets of more than {} parameters", params.size());
    first -= count;
    buckets_.push_back({.first = first,
                        .count = count,
                        .reducer = GradientReducer(params.subspan(first, count), context_,
                                                   [this](FSDPEventKind step) { report(step); })});
  }
  TESSERA_ASSERT(first == 0, "buckets lack the first {} parameters", first);
}

size_t UnitGradients::find_bucket(size_t param) const {
  const auto bucket = std::ranges::find_if(buckets_, [&](const Bucket& own) { return own.first <= param; });
  return static_cast<size_t>(bucket - buckets_.begin());
}

/// Gradients on a tensor-parallel mesh may need their own collectives, which cannot run at any time in backward.
void UnitGradients::set_alone(bool is_alone) {
  bool has_buckets = is_alone && bucket_bytes_ > 0 && context_->axes.num_shards() == 1;
  std::vector<int64_t> bytes;
  for (const auto& param : params_.all()) {
    has_buckets = has_buckets && param.spec()->mesh() == context_->axes.mesh;
    bytes.push_back(param.slot().numel() * static_cast<int64_t>(c10::elementSize(reduce_dtype(param))));
  }
  cut(has_buckets ? cut_by_bytes(bytes, bucket_bytes_) : std::vector{bytes.size()});
}

void UnitGradients::report(FSDPEventKind step) const {
  if (report_) {
    report_(step);
  }
}

at::ScalarType UnitGradients::reduce_dtype(const ShardedParam& param) const {
  return context_->reduce_dtype.value_or(param.spec()->dtype());
}

// Nothing accumulates into a frozen parameter; its gradient stays, so that an optimizer's zero_grad() finds it.
void UnitGradients::begin() {
  const auto params = params_.all();
  for (auto& param : params) {
    if (param.requires_grad()) {
      param.stash_sharded_grad();
    }
  }
  if (!has_buckets()) {
    return;
  }
  next_ = 0;
  for (auto& bucket : buckets_) {
    bucket.waits_for = std::ranges::count_if(params.subspan(bucket.first, bucket.count), &ShardedParam::requires_grad);
  }
}

void UnitGradients::restore() {
  restore_stashed_grads(params_.all());
}

void UnitGradients::keep() {
  for (auto& param : params_.all()) {
    param.keep_unsharded_grad(reduce_dtype(param));
  }
  restore();
  report(FSDPEventKind::KeepGradients);
}

void UnitGradients::release() {
  for (auto& param : params_.all()) {
    param.drop_unsharded_grads();
  }
  restore();
}

void UnitGradients::abort() {
  for (auto& bucket : buckets_) {
    bucket.reducer.discard();
  }
  next_ = 0;
  release();
}

bool UnitGradients::is_reducing() const {
  return std::ranges::any_of(buckets_, [](const Bucket& bucket) { return bucket.reducer.in_flight(); });
}

void UnitGradients::arrived(size_t param) {
  --buckets_[find_bucket(param)].waits_for;
}

GradientReducer* UnitGradients::next() {
  if (next_ == buckets_.size()) {
    next_ = 0;
    return nullptr;
  }
  if (next_ == 0) {
    check_trained_dtypes();
  }
  return &buckets_[next_++].reducer;
}

GradientReducer* UnitGradients::next_complete() {
  const bool is_complete = next_ < buckets_.size() && buckets_[next_].waits_for == 0;
  return is_complete ? next() : nullptr;
}

/// fully_shard checked that they have one dtype; others may be trained since.
void UnitGradients::check_trained_dtypes() const {
  const ShardedParam* first = nullptr;
  for (const auto& param : params_.all()) {
    if (!param.requires_grad()) {
      continue;
    }
    first = first ? first : &param;
    TESSERA_CHECK(
        StateError, param.spec()->dtype() == first->spec()->dtype(),
        "{0}: parameters of {1} that are trained need one dtype, but since then one of '{2}' in {3} and '{4}' in "
        "{5} was set to require a gradient; freeze one, or convert one before {0}",
        context_->api, param.origin().module, first->origin().name, c10::toString(first->spec()->dtype()),
        param.origin().name, c10::toString(param.spec()->dtype()));
  }
}

void UnitGradients::check_none_frozen_since() const {
  for (const auto& param : params_.all()) {
    TESSERA_CHECK(
        StateError, param.requires_grad() || !param.awaits_reduction(),
        "{}: parameter '{}' of {} was frozen while its gradient, of a backward with "
        "set_requires_gradient_sync(false), waits for its reduction. Freeze it after a backward that reduces, or "
        "drop those gradients by reset_iter_state()",
        context_->api, param.origin().name, param.origin().module);
  }
  for (const auto& bucket : buckets_) {
    TESSERA_CHECK(StateError,
                  !bucket.reducer.has_partial() || has_trainable(params_.all().subspan(bucket.first, bucket.count)),
                  "{}: all parameters of {} were frozen while gradients of theirs, of a backward with "
                  "set_requires_all_reduce(false), wait for their all-reduce. Freeze them after a backward that "
                  "all-reduces, or drop those gradients by reset_iter_state()",
                  context_->api, params_.module());
  }
}

void UnitGradients::check_not_taken(size_t param) const {
  TESSERA_CHECK(StateError, find_bucket(param) >= next_,
                "replicate: parameter '{}' of {} got a second gradient in one backward, from a backward inside of it, "
                "when the first was on its way to the other ranks. Call replicate with bucket_cap_mb = 0",
                params_.all()[param].origin().name, params_.all()[param].origin().module);
}

/// Shards are there if the group's ranks read each other's memory.
void UnitGradients::add_exposed(std::vector<size_t>& bytes) const {
  if (!shared_place(params_.flat_shard())) {
    return;
  }
  for (const auto& param : params_.all()) {
    if (param.requires_grad() && param.unsharded().scalar_type() == reduce_dtype(param)) {
      bytes.push_back(param.unsharded().nbytes());
    }
  }
}

}  // namespace tessera
