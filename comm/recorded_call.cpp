#include "comm/recorded_call.h"

#include <fmt/format.h>

#include "comm/backend/group_backend.h"
#include "comm/context/rank_state.h"

namespace tessera::detail {

FlightCall record_call(const CallFacts& facts, const c10d::Backend& backend) {
  count_collective(facts.kind, facts.bytes_sent);
  const auto* const own = dynamic_cast<const GroupBackend*>(&backend);
  if (own == nullptr) {
    return {};
  }
  const auto& record = rank_state().flight_record;
  const uint64_t number = record->issue({.input_numel = facts.input_numel,
                                         .output_numel = facts.output_numel,
                                         .bytes_sent = facts.bytes_sent,
                                         .group = own->flight_group(*record),
                                         .peer = facts.peer,
                                         .kind = facts.kind,
                                         .dtype = static_cast<int8_t>(facts.dtype),
                                         .op = static_cast<int8_t>(facts.op)});
  return {.record = record, .number = number};
}

FlightRange::FlightRange(const char* part, const FlightCall& call) : range_(at::RecordScope::USER_SCOPE) {
  if (range_.isActive()) [[unlikely]] {
    range_.before(fmt::format("comm {} #{}", part, call.number));
  }
}

}  // namespace tessera::detail
