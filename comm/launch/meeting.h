#pragma once
// How the ranks of a job meet over its store: who may take part, and when all have come.
//
//   key                    set by    to
//   job                    rank 0    the job's identity; ranks of other jobs go
//   seat/<ranks>/<rank>    the rank  its process, which may take it again; another process goes
//   .../taken              the rank  "", while it waits for the others
//   all_connected          rank 0    the number of ranks, once all seats are taken
//   gave_up                rank 0    why it ends the meeting (a rank has died, say), for half a second before it does
//   other_secret           a rank    its number, where it has another secret than rank 0: both give up. Rank 0 takes a
//                                    stranger's word for it, who could as well stop the meeting in another way

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/error.h"
#include "comm/launch/store.h"

namespace tessera {

/// A rank that may not take part, or whose peer has died.
class MeetingError : public CommError {
 public:
  using CommError::CommError;
};

/// Returns when all ranks have come. Throws MeetingError for a rank of another job, a second process of a rank, and
/// where a rank that had come dies on the host of rank 0, has another secret, or a stranger has changed what a rank
/// said; what the store throws at a time-out.
void meet(c10d::Store& store, const StoreOptions& options);

/// The other ranks that have not taken their seats; none if the store, which may end with rank 0, cannot tell.
std::vector<int> absent_ranks(c10d::Store& store, const StoreOptions& options);

/// "job \"slurm 7.0\"", which has met at an address; "" if none can be told within a moment. Whoever serves the store
/// may have made it up: it is for messages.
std::string find_job_at(const std::string& address, int port);

}  // namespace tessera
