#pragma once
// Test cases of comm/point_to_point.h for every backend. Each is the body of one rank, over the default group or groups
// made from it, and is called on all of its ranks.

#include <cstdint>
#include <string>

namespace tessera::testing {

/// Every pair of ranks, both ways: dtypes, sizes from nothing to `largest` elements, what is counted.
void check_messages(int64_t largest);

/// Both directions of a pair at once, `elements` floats each, by send_async and recv, and by recv_async and send.
void check_exchange(int64_t elements);

/// Every rank passes its number on until it is back, as the very first messages of a group too.
void check_ring();

/// More messages of one way than any buffer holds, waited for in another order on each rank.
void check_many_in_flight();

/// Messages that are dropped without wait(): the later ones are right, and the tensors are free then.
void check_dropped_messages();

/// Messages between collectives and beside another group's messages, in another order on each rank.
void check_order_is_free();

/// A group of 3 whose ranks are in another order. For at least 4 ranks.
void check_sub_group();

/// Through c10d's own interface.
void check_c10d();

/// The two ends of a message differ in size, dtype or tag: an error on both, which says what each did, and no later
/// message takes the place of another. The default group is fine afterwards. For 2 ranks.
void check_ends_that_differ();

/// The other rank of a pair is gone: an error that holds `error`. For 2 ranks.
void check_peer_that_left(const std::string& error);

/// Peers and tensors that do not fit.
void check_refusals();

}  // namespace tessera::testing
