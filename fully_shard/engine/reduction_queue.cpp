#include "fully_shard/engine/reduction_queue.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/report.h"

namespace tessera {

namespace {

/// `numel` elements whose memory is the pool's.
at::Tensor acquired(int64_t numel, const at::TensorOptions& options, BlockPool& pool) {
  return PooledBuffer(numel, options).acquire(pool);
}

/// The tensor's memory, which ends with the result and the last of the tensor's views.
c10::DataPtr hold(at::Tensor tensor) {
  void* const data = tensor.mutable_data_ptr();
  const c10::Device device = tensor.device();
  auto holder = std::make_unique<at::Tensor>(std::move(tensor));
  return {data, holder.release(), [](void* held) { delete static_cast<at::Tensor*>(held); }, device};
}

int64_t bytes_of(const GradientReduction& reduction) {
  return reduction.numel() * static_cast<int64_t>(reduction.buffer_options().dtype().itemsize());
}

}  // namespace

// Without streams, collectives in flight keep what they read and write.
ReductionQueue::~ReductionQueue() {
  if (streams_.empty()) {
    return;
  }
  try {
    discard_in_flight();
    clear();
  } catch (const std::exception& failure) {
    report_failure("fully_shard: reductions were dropped while they ran: {}", failure.what());
  }
}

void ReductionQueue::discard_in_flight() {
  auto items = copying_;
  for (const auto* bucket : {&scattering_, &reducing_}) {
    if (*bucket) {
      items.insert(items.end(), (*bucket)->items.begin(), (*bucket)->items.end());
    }
  }
  for (const auto& [group, part] : items) {
    group->gradients().reduction(part).discard();
  }
}

void ReductionQueue::push(const std::shared_ptr<ParamGroup>& group, const GradientSettings& settings) {
  auto& parts = group->gradients().parts();
  while (parts.has_next()) {
    push_part(group, parts.take_next(), settings);
  }
  parts.end();
}

void ReductionQueue::push_complete(const std::shared_ptr<ParamGroup>& group, const GradientSettings& settings) {
  auto& parts = group->gradients().parts();
  while (parts.is_next_complete()) {
    push_part(group, parts.take_next(), settings);
  }
}

bool ReductionQueue::belongs_to_collected(const GradientReduction& reduction, int64_t bytes, int64_t cap) const {
  if (collected_.empty() || collected_bytes_ + bytes > cap) {
    return false;
  }
  const auto& [group, part] = collected_.front();
  return reduction.can_share_with(group->gradients().reduction(part));
}

void ReductionQueue::push_part(const std::shared_ptr<ParamGroup>& group, size_t part,
                               const GradientSettings& settings) {
  auto& gradients = group->gradients();
  if (!gradients.collect(part, settings)) {
    return;
  }
  const auto& reduction = gradients.reduction(part);
  const int64_t bytes = reduction.can_share() && gradients.parts().size() == 1 ? bytes_of(reduction) : 0;
  const auto cap = [&] {
    return is_first_ ? std::min(gradients.bucket_bytes(), kFirstBucketBytes) : gradients.bucket_bytes();
  };
  if (bytes == 0 || gradients.bucket_bytes() == 0) {
    issue({.items = {{group, part}}});
    return;
  }
  if (!belongs_to_collected(reduction, bytes, cap())) {
    flush();
  }
  collected_.push_back({group, part});
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

const std::shared_ptr<ReduceStream>& ReductionQueue::stream_of(const Bucket& bucket) {
  const auto& [group, part] = bucket.items[0];
  return group->gradients().reduction(part).stream();
}

void ReductionQueue::issue(Bucket bucket) {
  advance();
  if (bucket.items.size() > 1) {
    issue_together(bucket);
  } else {
    const auto& [group, part] = bucket.items[0];
    group->gradients().start(part, *group->pool());
  }
  if (const auto& stream = stream_of(bucket); stream->exists() && !std::ranges::count(streams_, stream)) {
    streams_.push_back(stream);
  }
  scattering_ = std::move(bucket);
}

void ReductionQueue::issue_together(Bucket& bucket) const {
  const at::AutoDispatchBelowADInplaceOrView below;
  int64_t numel = 0;
  for (const auto& [group, part] : bucket.items) {
    numel += group->gradients().reduction(part).numel();
  }
  const auto& [first, first_part] = bucket.items[0];
  const auto& reduction = first->gradients().reduction(first_part);
  bucket.buffer = acquired(numel, reduction.buffer_options(), *first->pool());
  int64_t offset = 0;
  for (const auto& [group, part] : bucket.items) {
    const int64_t own = group->gradients().reduction(part).numel();
    group->gradients().start_in(part, bucket.buffer.narrow(0, offset, own));
    offset += own;
  }
  bucket.pending = slots_->all_reduce(bucket.buffer, reduction.op(), reduction.replica_group());
}

void ReductionQueue::finish(const Item& item) {
  auto& gradients = item.group->gradients();
  gradients.finish(item.part);
  if (gradients.is_copying(item.part)) {
    copying_.push_back(item);
  }
}

void ReductionQueue::finish(Bucket bucket) {
  const auto& stream = stream_of(bucket);
  {
    const SideStream::Scope scope(*stream);
    bucket.pending.wait();
  }
  for (const auto& item : bucket.items) {
    finish(item);
  }
  if (bucket.buffer.defined()) {
    stream->defer_free(hold(std::move(bucket.buffer)));
  }
}

void ReductionQueue::advance() {
  for (const auto& [group, part] : std::exchange(copying_, {})) {
    group->gradients().finish(part);
  }
  if (auto bucket = std::exchange(reducing_, std::nullopt)) {
    finish(*std::move(bucket));
  }
  if (auto bucket = std::exchange(scattering_, std::nullopt)) {
    const auto& [group, part] = bucket->items[0];
    scattered_.push_back(bucket->items[0]);
    if (bucket->items.size() > 1 || group->gradients().start_all_reduce(part)) {
      reducing_ = std::move(bucket);
    } else if (group->gradients().is_copying(part)) {
      copying_.push_back(bucket->items[0]);
    }
  }
}

void ReductionQueue::drain() {
  flush();
  while (scattering_ || reducing_ || !copying_.empty()) {
    advance();
  }
  for (const auto& [group, part] : scattered_) {
    group->gradients().reduction(part).wait_for_readers();
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
