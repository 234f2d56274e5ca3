#include "comm/shm/slot_header.h"

#include <algorithm>
#include <cstring>

#include "comm/shm/shm_layout.h"

namespace tessera {

namespace {

struct Header {
  Collective kind;
  ReduceOp op;
  c10::ScalarType dtype;
  uint8_t unused;
  int32_t root;
  int32_t tag;
  int32_t unused_too;
  int64_t output;
  int64_t input;
  int64_t steps;
};
static_assert(sizeof(Header) == 40 && sizeof(Header) <= ShmLayout::kAlignment);

// At kAlignment, the header continues with the splits of an all_to_all (the input's first), a SharedPlace of an
// all_gather, or one for each rank of a reduce_scatter's pieces.
static_assert(sizeof(SharedPlace) == ShmLayout::kPlaceBytes);
static_assert(2 * sizeof(int64_t) <= ShmLayout::kPlaceBytes);

/// Returns a field of a slot, const or not.
template <typename Char>
Char* place_in(Char* slot, int to) {
  return slot + ShmLayout::kAlignment + to * ShmLayout::kPlaceBytes;
}

void write_place(char* to, const std::optional<SharedPlace>& place) {
  const SharedPlace written = place.value_or(SharedPlace{});
  std::memcpy(to, &written, sizeof(written));
}

std::optional<SharedPlace> read_place(const char* from) {
  SharedPlace place;
  std::memcpy(&place, from, sizeof(place));
  return place.file >= 0 ? std::optional(place) : std::nullopt;
}

CollectiveSignature read_call(const char* slot, const Header& header, size_t ranks) {
  CollectiveSignature call = {.kind = header.kind,
                              .op = header.op,
                              .root = header.root,
                              .tag = header.tag,
                              .dtype = header.dtype,
                              .output = header.output,
                              .input = header.input};
  if (call.kind == Collective::AllToAll) {
    const char* const splits = slot + ShmLayout::kAlignment;
    call.input_splits.resize(ranks);
    call.output_splits.resize(ranks);
    std::memcpy(call.input_splits.data(), splits, ranks * sizeof(int64_t));
    std::memcpy(call.output_splits.data(), splits + ranks * sizeof(int64_t), ranks * sizeof(int64_t));
  }
  return call;
}

}  // namespace

void write_header(char* slot, const CollectiveSignature& call, int64_t steps,
                  const std::optional<SharedPlace>& exposed) {
  const Header header = {.kind = call.kind,
                         .op = call.op,
                         .dtype = call.dtype,
                         .unused = 0,
                         .root = call.root,
                         .tag = call.tag,
                         .unused_too = 0,
                         .output = call.output,
                         .input = call.input,
                         .steps = steps};
  std::memcpy(slot, &header, sizeof(header));
  if (call.kind == Collective::AllToAll) {
    const size_t bytes = call.input_splits.size() * sizeof(int64_t);
    std::memcpy(slot + ShmLayout::kAlignment, call.input_splits.data(), bytes);
    std::memcpy(slot + ShmLayout::kAlignment + bytes, call.output_splits.data(), bytes);
  }
  if (call.kind == Collective::AllGather) {
    write_place(place_in(slot, 0), exposed);
  }
}

std::optional<SharedPlace> read_exposed(const char* slot) {
  Header header;
  std::memcpy(&header, slot, sizeof(header));
  return header.kind == Collective::AllGather ? read_place(place_in(slot, 0)) : std::nullopt;
}

void write_piece_place(char* slot, int to, const std::optional<SharedPlace>& place) {
  write_place(place_in(slot, to), place);
}

std::optional<SharedPlace> read_piece_place(const char* slot, int to) {
  return read_place(place_in(slot, to));
}

HeaderAgreement compare_headers(c10::ArrayRef<const char*> slots) {
  Header first;
  std::memcpy(&first, slots[0], sizeof(first));
  const auto is_same = [&](const char* slot) { return std::memcmp(slot, slots[0], sizeof(Header)) == 0; };
  if (first.kind != Collective::AllToAll && std::all_of(slots.begin(), slots.end(), is_same)) {
    return {.steps = first.steps};
  }
  HeaderAgreement agreement;
  std::vector<CollectiveSignature> calls;
  for (const char* slot : slots) {
    Header header;
    std::memcpy(&header, slot, sizeof(header));
    agreement.steps = std::max(agreement.steps, header.steps);
    calls.push_back(read_call(slot, header, slots.size()));
  }
  agreement.mismatch = find_mismatch(calls);
  return agreement;
}

}  // namespace tessera
