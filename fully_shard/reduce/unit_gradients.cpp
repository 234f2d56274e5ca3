#include "fully_shard/reduce/unit_gradients.h"

#include <algorithm>

#include "base/error.h"
#include "comm/shm/shared_memory.h"

namespace tessera {

UnitGradients::UnitGradients(UnitParams& params, Options options)
    : params_(params), options_(std::move(options)), parts_(options_.reduction) {}

/// Gradients on a tensor-parallel mesh may need collectives of their own, which are not for any time in backward.
void UnitGradients::set_alone(bool is_alone) {
  const auto params = params_.all();
  const bool is_plain =
      std::ranges::none_of(params, [](const ShardedParam& param) { return param.is_tensor_parallel(); });
  const bool has_segments =
      is_alone && is_plain && options_.bucket_bytes > 0 && options_.reduction.axes.num_shards() == 1;
  parts_.cut(has_segments ? cut_by_bytes(bytes_of_each(), options_.bucket_bytes) : std::vector{params.size()});
}

void UnitGradients::report(FSDPEventKind step) const {
  if (report_) {
    report_(step);
  }
}

at::ScalarType UnitGradients::reduce_dtype(const ShardedParam& param) const {
  return options_.reduction.reduce_dtype.value_or(param.dtype());
}

/// Of each parameter, as it is reduced.
std::vector<int64_t> UnitGradients::bytes_of_each() const {
  std::vector<int64_t> bytes;
  for (const auto& param : params_.all()) {
    bytes.push_back(param.slot().numel() * static_cast<int64_t>(c10::elementSize(reduce_dtype(param))));
  }
  return bytes;
}

bool UnitGradients::has_trainable(size_t part) const {
  return std::ranges::any_of(params_of(part), [](const ShardedParam& param) { return param.requires_grad(); });
}

// Nothing accumulates into a frozen parameter: its gradient stays, where an optimizer's zero_grad() finds it.
void UnitGradients::begin() {
  const auto params = params_.all();
  for (auto& param : params) {
    if (param.requires_grad()) {
      param.stash_sharded_grad();
    }
  }
  parts_.begin(params);
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
  for (size_t part = 0; part < parts_.size(); ++part) {
    reduction(part).discard();
  }
  parts_.end();
  release();
}

bool UnitGradients::is_reducing() const {
  bool in_flight = false;
  for (size_t part = 0; part < parts_.size(); ++part) {
    in_flight = in_flight || reduction(part).in_flight();
  }
  return in_flight;
}

bool UnitGradients::collect(size_t part, const GradientSettings& settings) {
  if (!has_trainable(part)) {
    restore_stashed_grads(params_of(part));
    return false;
  }
  if (options_.has_mixed_dtypes) {
    check_trained_dtypes();
  }
  reduction(part).collect(params_of(part), settings);
  return true;
}

void UnitGradients::start(size_t part, BlockPool& pool) {
  reduction(part).start(params_of(part), pool);
  report(reduction(part).is_all_reducing() ? FSDPEventKind::AllReduce : FSDPEventKind::ReduceScatter);
}

void UnitGradients::start_in(size_t part, const at::Tensor& buffer) {
  reduction(part).start_in(buffer);
  report(FSDPEventKind::AllReduce);
}

bool UnitGradients::start_all_reduce(size_t part) {
  const bool was_issued = reduction(part).is_all_reducing();
  const bool in_flight = reduction(part).start_all_reduce(params_of(part));
  if (!was_issued && !is_copying(part)) {
    report(in_flight ? FSDPEventKind::AllReduce : FSDPEventKind::Reduced);
  }
  return in_flight;
}

void UnitGradients::finish(size_t part) {
  reduction(part).finish(params_of(part));
  if (!is_copying(part)) {
    report(FSDPEventKind::Reduced);
  }
}

/// fully_shard saw that they are of one dtype; others may be trained since.
void UnitGradients::check_trained_dtypes() const {
  const ShardedParam* first = nullptr;
  for (const auto& param : params_.all()) {
    if (!param.requires_grad()) {
      continue;
    }
    first = first ? first : &param;
    TESSERA_CHECK(
        StateError, param.dtype() == first->dtype(),
        "{0}: parameters of {1} that are trained need one dtype, but since then one of '{2}' in {3} and '{4}' in "
        "{5} was set to require a gradient; freeze one, or convert one before {0}",
        options_.reduction.api, param.origin().module, first->origin().name, c10::toString(first->dtype()),
        param.origin().name, c10::toString(param.dtype()));
  }
}

void UnitGradients::check_none_frozen_since() const {
  for (const auto& param : params_.all()) {
    TESSERA_CHECK(
        StateError, param.requires_grad() || !param.awaits_reduction(),
        "{}: parameter '{}' of {} was frozen while its gradient, of a backward with "
        "set_requires_gradient_sync(false), waits for its reduction. Freeze it after a backward that reduces, or "
        "drop those gradients by reset_iter_state()",
        options_.reduction.api, param.origin().name, param.origin().module);
  }
  for (size_t part = 0; part < parts_.size(); ++part) {
    TESSERA_CHECK(StateError, has_trainable(part) || !reduction(part).has_partial(),
                  "{}: all parameters of {} were frozen while gradients of theirs, of a backward with "
                  "set_requires_all_reduce(false), wait for their all-reduce. Freeze them after a backward that "
                  "all-reduces, or drop those gradients by reset_iter_state()",
                  options_.reduction.api, params_.module());
  }
}

void UnitGradients::check_not_taken(size_t param) const {
  TESSERA_CHECK(StateError, !parts_.was_taken(param),
                "replicate: parameter '{}' of {} got a second gradient in one backward, from a backward inside of it, "
                "when the first was on its way to the other ranks. Call replicate with bucket_cap_mb = 0",
                params_.all()[param].origin().name, params_.all()[param].origin().module);
}

/// The shards lie there where the group's ranks read each other's memory.
void UnitGradients::add_exposed(std::vector<size_t>& bytes) const {
  if (!shared_place(params_.flat_shard())) {
    return;
  }
  for (const auto& param : params_.all()) {
    if (param.requires_grad() && param.unsharded().scalar_type() == reduce_dtype(param)) {
      bytes.push_back(param.unsharded_size());
    }
  }
}

}  // namespace tessera
