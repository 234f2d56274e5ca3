#include "comm/shm/shm_plan.h"

#include "base/error.h"

namespace tessera {

namespace {

// Up to this size, an all_reduce has one round, because a second one costs more than reducing everything on every rank.
constexpr int64_t kShmOneRoundBytes = int64_t{32} * 1024;

int64_t steps_for(int64_t bytes, int64_t chunk) {
  return std::max<int64_t>(1, (bytes + chunk - 1) / chunk);
}

ShmPhase plan_gather(int64_t bytes, int64_t ranks) {
  ShmPhase phase{.steps = steps_for(bytes, ShmLayout::kSlotBytes), .sent = {{0, bytes}}};
  for (int64_t from = 0; from < ranks; ++from) {
    phase.received.push_back({from * bytes, bytes});
  }
  return phase;
}

ShmPhase plan_broadcast(int64_t bytes, int root, int rank, int64_t ranks) {
  ShmPhase phase{
      .from_output = true, .steps = steps_for(bytes, ShmLayout::kSlotBytes), .sent = {{0, rank == root ? bytes : 0}}};
  for (int64_t from = 0; from < ranks; ++from) {
    phase.received.push_back({0, from == root ? bytes : 0});
  }
  return phase;
}

// The sender is rank 0 of a message's memory, and the receiver rank 1. Each plans according to its own tensor.
ShmPhase plan_message(int64_t sent, int64_t received) {
  return {.steps = steps_for(std::max(sent, received), ShmLayout::kSlotBytes),
          .sent = {{0, sent}},
          .received = {{0, received}, {0, 0}}};
}

ShmPhase plan_reduce_whole(int64_t bytes, int64_t ranks) {
  ShmPhase phase{
      .reduces = true, .from_output = true, .steps = steps_for(bytes, ShmLayout::kSlotBytes), .sent = {{0, bytes}}};
  phase.received.resize(ranks, {0, bytes});
  return phase;
}

ShmPhase plan_reduce_scatter(int64_t part, const ShmLayout& layout) {
  ShmPhase phase{.own_segments = true,
                 .reduces = true,
                 .chunk = layout.part_bytes(),
                 .steps = steps_for(part, layout.part_bytes())};
  for (int64_t to = 0; to < layout.ranks; ++to) {
    phase.sent.push_back({to * part, part});
  }
  phase.received.resize(layout.ranks, {0, part});
  return phase;
}

// Returns an in-place reduce_scatter, then an all_gather; the last parts may be shorter, or empty.
c10::SmallVector<ShmPhase, 1> plan_reduce_and_gather(int64_t numel, int64_t item, int rank, const ShmLayout& layout) {
  const int64_t part = (numel + layout.ranks - 1) / layout.ranks * item, total = numel * item;
  c10::SmallVector<ByteRange, 4> parts;
  for (int64_t owner = 0; owner < layout.ranks; ++owner) {
    const int64_t begin = std::min(owner * part, total);
    parts.push_back({begin, std::min(part, total - begin)});
  }
  ShmPhase reduce = plan_reduce_scatter(part, layout), gather{.after_previous = true, .from_output = true};
  reduce.from_output = true;
  reduce.sent = parts;
  std::fill(reduce.received.begin(), reduce.received.end(), parts[rank]);
  gather.steps = steps_for(part, gather.chunk);
  gather.sent = {parts[rank]};
  gather.received = std::move(parts);
  c10::SmallVector<ShmPhase, 1> phases;
  phases.push_back(std::move(reduce));
  phases.push_back(std::move(gather));
  return phases;
}

ShmPhase plan_all_to_all(const CollectiveSignature& call, int64_t item, const ShmLayout& layout) {
  ShmPhase phase{.own_segments = true, .chunk = layout.part_bytes()};
  int64_t sent = 0, received = 0;
  for (int64_t other = 0; other < layout.ranks; ++other) {
    phase.sent.push_back({sent, call.input_splits[other] * item});
    phase.received.push_back({received, call.output_splits[other] * item});
    sent += phase.sent.back().bytes;
    received += phase.received.back().bytes;
    phase.steps = std::max(phase.steps, steps_for(phase.sent.back().bytes, phase.chunk));
  }
  return phase;
}

}  // namespace

ShmPlan plan_call(const CollectiveSignature& call, int rank, const ShmLayout& layout) {
  const int64_t item = call.kind == Collective::Barrier ? 0 : static_cast<int64_t>(c10::elementSize(call.dtype));
  switch (call.kind) {
    case Collective::AllGather:
      return {.phases = {plan_gather(call.input * item, layout.ranks)}};
    case Collective::ReduceScatter:
      return {.phases = {plan_reduce_scatter(call.output * item, layout)}};
    case Collective::AllReduce:
      if (call.output * item <= kShmOneRoundBytes) {
        return {.phases = {plan_reduce_whole(call.output * item, layout.ranks)}};
      }
      return {.phases = plan_reduce_and_gather(call.output, item, rank, layout)};
    case Collective::Broadcast:
      return {.phases = {plan_broadcast(call.output * item, call.root, rank, layout.ranks)}};
    case Collective::AllToAll:
      return {.phases = {plan_all_to_all(call, item, layout)}, .steps_by_agreement = true};
    case Collective::Barrier:
      return {.phases = {plan_gather(0, layout.ranks)}};
    case Collective::Send:
      return {.phases = {plan_message(call.input * item, 0)}};
    case Collective::Recv:
      return {.phases = {plan_message(0, call.output * item)}};
    case Collective::Scatter:
    case Collective::Gather:
      break;
  }
  TESSERA_ASSERT(false, "{} is not a call of this backend", name(call.kind));
}

}  // namespace tessera
