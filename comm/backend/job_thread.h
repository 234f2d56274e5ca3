#pragma once
// Runs a backend's composite collectives one after another on a thread.
//
//   JobThread thread;
//   auto work = thread.push("all_reduce", [=] { ... });  // returns at once
//   work->wait();                                        // rethrows the job's exception

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera {

class RankContext;

/// Runs jobs in order, as the rank that made it. If one throws, later ones do not run. Thread safety: any number of
/// threads may push jobs.
class JobThread {
 public:
  JobThread();
  /// Waits for the running job; later ones fail.
  ~JobThread();
  JobThread(const JobThread&) = delete;
  JobThread& operator=(const JobThread&) = delete;

  /// Adds a job, named `what` in errors. The result may outlive the thread.
  c10::intrusive_ptr<c10d::Work> push(std::string what, std::function<void()> run);

 private:
  struct Job {
    std::string what;
    std::function<void()> run;
    std::promise<void> done;
  };

  void run(const RankContext& context);
  void finish(Job& job);

  std::mutex mutex_;  // guards the following members
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool stops_ = false;
  std::string failure_;  // of this thread
  std::thread thread_;   // last, since it uses the others
};

}  // namespace tessera
