#include "fully_shard/engine/schedule.h"

#include <algorithm>

namespace tessera {

namespace {

void record_once(std::vector<int64_t>& order, int64_t unit) {
  if (std::find(order.begin(), order.end(), unit) == order.end()) {
    order.push_back(unit);
  }
}

template <class Iterator>
std::optional<int64_t> successor(Iterator begin, Iterator end, int64_t unit) {
  const auto found = std::find(begin, end, unit);
  return found == end || found + 1 == end ? std::nullopt : std::optional(*(found + 1));
}

void start_over(std::vector<int64_t>& last, std::vector<int64_t>& current) {
  if (!current.empty()) {
    last.swap(current);
    current.clear();
  }
}

}  // namespace

void Schedule::begin_forward() {
  start_over(last_forward_, forward_);
  forward_end_.clear();
}

void Schedule::record_forward(int64_t unit) {
  record_once(forward_, unit);
}

void Schedule::record_forward_end(int64_t unit) {
  record_once(forward_end_, unit);
}

std::optional<int64_t> Schedule::next_in_forward(int64_t unit) const {
  return successor(last_forward_.begin(), last_forward_.end(), unit);
}

void Schedule::begin_backward() {
  start_over(last_backward_, backward_);
}

void Schedule::record_backward(int64_t unit) {
  record_once(backward_, unit);
}

std::optional<int64_t> Schedule::next_in_backward(int64_t unit) const {
  const auto& last = last_backward_;
  if (std::find(last.begin(), last.end(), unit) != last.end()) {
    return successor(last.begin(), last.end(), unit);
  }
  return successor(forward_end_.rbegin(), forward_end_.rend(), unit);
}

void Schedule::abandon() {
  forward_.clear();
  forward_end_.clear();
  backward_.clear();
}

}  // namespace tessera
