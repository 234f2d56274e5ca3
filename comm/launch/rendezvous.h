#pragma once
// Protocol by which the ranks of a job meet over its store. Keys:
//
//   job                    rank 0    the job's identity; ranks of other jobs leave
//   seat/<ranks>/<rank>    the rank  its process, which may retry; another process leaves
//   .../taken              the rank  "", while it waits for the others
//   all_connected          rank 0    the number of ranks, once all have come
//   gave_up                rank 0    why the rendezvous fails, for half a second before rank 0 ends it
//   other_secret           a rank    its number, if its secret differs from rank 0's: both give up. Not authenticated

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/error.h"
#include "comm/launch/host_process.h"
#include "comm/launch/store.h"

namespace tessera {

class RendezvousError : public CommError {  // a rank may not take part, or its peer has died
 public:
  using CommError::CommError;
};

/// Waits until all ranks have arrived. Throws the store's error at the timeout. Throws RendezvousError for a rank of
/// another job, a second process of a rank, a rank that dies on rank 0's host, a different secret, and a forged value.
void rendezvous(c10d::Store& store, const StoreOptions& options);

/// Watches ranks that have met and wait for each other over the store, before they have connections. Reads their
/// processes at the first look.
class SeatWatch {
 public:
  /// `store` is the one where they met, or a PrefixStore of it. Does nothing if the ranks did not meet there.
  SeatWatch(c10d::Store& store, int world_size) : store_(store), world_size_(world_size) {}
  /// Throws RendezvousError that names a rank of this host that has died.
  void look();

 private:
  c10d::Store& store_;
  const int world_size_;
  bool is_read_ = false;
  HostProcess own_ = {};
  std::vector<HostProcess> processes_ = {};
};

std::vector<int> absent_ranks(c10d::Store& store, const StoreOptions& options);  // empty if the store has ended

/// Returns the unverified job at an address, for messages: "job \"slurm 7.0\"", or "" if unknown after 1 s.
std::string find_job_at(const std::string& address, int port);

}  // namespace tessera
