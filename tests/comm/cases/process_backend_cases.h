#pragma once
// Test cases for every backend whose ranks are processes. Each starts processes (testing/run_processes.h), so it is
// called once in a Catch2 test case, from its thread.

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::testing {

/// Every collective with every reduction gives the same bits as the "threads" backend, for tensors of some multiples of
/// each of `parts` elements.
void check_same_bits_as_threads(const std::string& backend, int world_size, const std::vector<c10::ScalarType>& dtypes,
                                const std::vector<int64_t>& parts);

/// Sub-groups with their ranks in another order, beside the default group, made again and again.
void check_sub_groups(const std::string& backend);

/// Works of one group are waited for in another order on each rank; the largest are of `elements` elements.
void check_waits_in_any_order(const std::string& backend, int64_t elements);

/// c10d's own all_to_all, of tensors that do not fit, is an error before anything is sent.
void check_all_to_all_that_does_not_fit(const std::string& backend);

/// A work that goes without wait(), on one of two ranks: later collectives are right, and its tensors are free then.
void check_dropped(const std::string& backend);

/// A rank dies in a collective: the others have an error that holds `error` within `limit`.
void check_peer_that_dies(const std::string& backend, const std::string& error, std::chrono::milliseconds limit);

/// A rank comes too late: the other has an error that names group and collective after the group's time-out.
void check_peer_that_does_not_come(const std::string& backend);

/// A time-out that is too long for any clock.
void check_longest_time_out(const std::string& backend);

/// The dtypes that can be reduced.
const std::vector<c10::ScalarType>& reducible_dtypes();

}  // namespace tessera::testing
