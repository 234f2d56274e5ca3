#include "fully_shard/engine/reduction_queue.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/report.h"
#include "comm/context/flight_record.h"
#include "fully_shard/memory/memory_label.h"

namespace tessera {

namespace {

/// Returns `numel` elements in memory of the pool.
at::Tensor acquired(int64_t numel, const at::TensorOptions& options, BlockPool& pool) {
  return PooledBuffer(numel, options).acquire(pool);
}

/// Returns a handle to the tensor's memory, which is freed with it and the last view of the tensor.
c10::DataPtr hold(at::Tensor tensor) {
  void* const data = tensor.mutable_data_ptr();
  const c10::Device device = tensor.device();
  auto holder = std::make_unique<at::Tensor>(std::move(tensor));
  return {data, holder.release(), [](void* held) { delete static_cast<at::Tensor*>(held); }, device};
}

int64_t count_bytes(const ReduceScatterLayout& layout) {
  return layout.numel() * static_cast<int64_t>(layout.options().dtype().itemsize());
}

/// Returns whether both can share an all-reduce.
bool can_share(const GradientReducer& a, const GradientReducer& b) {
  return a.context().axes.replica_group() == b.context().axes.replica_group() && a.op() == b.op() &&
         a.layout().dtype() == b.layout().dtype() && a.context().device == b.context().device;
}

}  // namespace

// Without streams, collectives in flight keep their tensors alive.
ReductionQueue::~ReductionQueue() {
  if (streams_.empty()) {
    return;
  }
  try {
    auto items = copying_;
    for (const auto* bucket : {&scattering_, &reducing_}) {
      if (*bucket) {
        items.insert(items.end(), (*bucket)->items.begin(), (*bucket)->items.end());
      }
    }
    for (const auto& item : items) {
      item.reducer->discard();
    }
    clear();
  } catch (const std::exception& failure) {
    report_failure("fully_shard: reductions were dropped while they ran: {}", failure.what());
  }
}

void ReductionQueue::push(const std::shared_ptr<ParamGroup>& group, const GradientSettings& settings) {
  while (auto* const reducer = group->gradients().next()) {
    push({group, reducer}, settings);
  }
}

void ReductionQueue::push_complete(const std::shared_ptr<ParamGroup>& group, const GradientSettings& settings) {
  while (auto* const reducer = group->gradients().next_complete()) {
    push({group, reducer}, settings);
  }
}

void ReductionQueue::push(Item item, const GradientSettings& settings) {
  const auto& gradients = item.group->gradients();
  if (!item.reducer->collect(settings)) {
    return;
  }
  const int64_t bytes = item.reducer->can_share() && !gradients.has_buckets() ? count_bytes(item.reducer->layout()) : 0;
  const auto cap = [&] {
    return is_first_ ? std::min(gradients.bucket_bytes(), kFirstBucketBytes) : gradients.bucket_bytes();
  };
  if (bytes == 0 || gradients.bucket_bytes() == 0) {
    issue({.items = {std::move(item)}});
    return;
  }
  if (!collected_.empty() &&
      (collected_bytes_ + bytes > cap() || !can_share(*item.reducer, *collected_.front().reducer))) {
    flush();
  }
  collected_.push_back(std::move(item));
  collected_bytes_ += bytes;
  if (collected_bytes_ >= cap()) {
    flush();
  }
}

void ReductionQueue::flush() {
  if (!collected_.empty()) {
    is_first_ = false;
    collected_bytes_ = 0;
    issue({.items = std::exchange(collected_, {})});
  }
}

const std::shared_ptr<StreamLane>& ReductionQueue::lane(const Bucket& bucket) {
  return bucket.items[0].reducer->stream();
}

void ReductionQueue::issue(Bucket bucket) {
  advance();
  const FlightLabel label(bucket.items[0].group->name());
  const MemoryLabel memory(MemoryUse::Gradients, bucket.items[0].group->name());
  if (bucket.items.size() > 1) {
    issue_together(bucket);
  } else {
    const auto& [group, reducer] = bucket.items[0];
    reducer->start(*group->pool());
  }
  if (const auto& stream = lane(bucket); stream->exists() && !std::ranges::count(streams_, stream)) {
    streams_.push_back(stream);
  }
  scattering_ = std::move(bucket);
}

void ReductionQueue::issue_together(Bucket& bucket) const {
  const at::AutoDispatchBelowADInplaceOrView below;
  int64_t numel = 0;
  for (const auto& item : bucket.items) {
    numel += item.reducer->layout().numel();
  }
  const auto& [group, first] = bucket.items[0];
  bucket.buffer = acquired(numel, first->layout().options(), *group->pool());
  int64_t offset = 0;
  for (const auto& item : bucket.items) {
    item.reducer->start_in(bucket.buffer.narrow(0, offset, item.reducer->layout().numel()));
    offset += item.reducer->layout().numel();
  }
  bucket.pending = slots_->all_reduce(bucket.buffer, first->op(), first->context().axes.replica_group());
}

void ReductionQueue::finish(const Item& item) {
  const MemoryLabel memory(MemoryUse::Gradients, item.group->name());
  item.reducer->finish();
  if (item.reducer->is_copying()) {
    copying_.push_back(item);
  }
}

void ReductionQueue::finish(Bucket bucket) {
  const auto& stream = lane(bucket);
  {
    const StreamLane::Scope scope(*stream);
    bucket.pending.wait();
  }
  for (const auto& item : bucket.items) {
    finish(item);
  }
  if (bucket.buffer.defined()) {
    stream->defer_free_of_current(hold(std::move(bucket.buffer)));
  }
}

void ReductionQueue::advance() {
  for (const auto& item : std::exchange(copying_, {})) {
    item.reducer->finish();
  }
  if (auto bucket = std::exchange(reducing_, std::nullopt)) {
    finish(*std::move(bucket));
  }
  if (auto bucket = std::exchange(scattering_, std::nullopt)) {
    const Item first = bucket->items[0];
    const FlightLabel label(first.group->name());
    const MemoryLabel memory(MemoryUse::Gradients, first.group->name());
    scattered_.push_back(first);
    if (bucket->items.size() > 1 || first.reducer->start_all_reduce()) {
      reducing_ = std::move(bucket);
    } else if (first.reducer->is_copying()) {
      copying_.push_back(first);
    }
  }
}

void ReductionQueue::drain() {
  flush();
  while (scattering_ || reducing_ || !copying_.empty()) {
    advance();
  }
  for (const auto& item : scattered_) {
    item.reducer->wait_for_readers();
  }
  scattered_.clear();
  drain_streams();
  is_first_ = true;
}

bool ReductionQueue::is_drained() const {
  return collected_.empty() && !scattering_ && !reducing_ && copying_.empty() && scattered_.empty() && streams_.empty();
}

void ReductionQueue::drain_streams() {
  for (const auto& stream : std::exchange(streams_, {})) {
    stream->drain();
  }
}

void ReductionQueue::await_streams() const {
  for (const auto& stream : streams_) {
    stream->mark().wait();
  }
}

void ReductionQueue::clear() {
  collected_.clear();
  collected_bytes_ = 0;
  copying_.clear();
  scattered_.clear();
  is_first_ = true;
  for (auto* bucket : {&scattering_, &reducing_}) {
    if (*bucket) {
      (*bucket)->pending.discard();
      bucket->reset();
    }
  }
  drain_streams();
}

}  // namespace tessera
