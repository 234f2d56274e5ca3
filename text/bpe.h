#pragma once
// Byte-pair encoding: a word's characters, or bytes, are joined pair by pair, in the order in which the vocabulary
// learned the pairs.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/json_view.h"

namespace tessera::text {

/// Maps pairs of ids to what they join to. Open addressing: a lookup reads one cache line.
class MergeTable {
 public:
  struct Merge {
    /// Position in the order in which pairs were learned; lower ranks join first.
    uint32_t rank = kNone;
    int32_t id = 0;
  };
  static constexpr uint32_t kNone = ~uint32_t{0};

  /// Makes an empty table for this number of pairs.
  explicit MergeTable(size_t pairs);

  /// Inserts a pair, or replaces its value.
  void insert(int32_t left, int32_t right, Merge merge) { slot(key(left, right)) = {key(left, right), merge}; }

  /// Returns rank kNone if the pair does not join.
  Merge find(int32_t left, int32_t right) const { return const_cast<MergeTable*>(this)->slot(key(left, right)).merge; }

 private:
  struct Slot {
    uint64_t key = ~uint64_t{0};
    Merge merge;
  };

  static uint64_t key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }

  /// Returns the pair's slot, or the empty one that it would get.
  Slot& slot(uint64_t key) {
    size_t i = (key * 0x9E3779B97F4A7C15) >> shift_;
    while (slots_[i].key != key && slots_[i].key != ~uint64_t{0}) {
      i = (i + 1) & (slots_.size() - 1);
    }
    return slots_[i];
  }

  std::vector<Slot> slots_;
  int shift_ = 0;
};

/// Holds what one thread needs to encode with a model, and caches the ids of a bounded number of words.
class BpeState {
 public:
  BpeState();

 private:
  friend class BpeModel;

  static constexpr size_t kMaxBytes = 30;
  static constexpr size_t kMaxIds = 8;
  static constexpr size_t kSlots = size_t{1} << 16;  // 4 MiB

  /// Caches a word in one cache line. A word has one place, and takes it from the one that was there.
  struct alignas(64) Slot {
    uint8_t bytes = 0;
    uint8_t ids = 0;
    char word[kMaxBytes];
    int32_t id[kMaxIds];
  };

  std::vector<Slot> slots_;
  // The word that is being joined has symbols, merges of each with the next, and links over joined ones.
  std::vector<int32_t> symbols_;
  std::vector<MergeTable::Merge> merges_;
  std::vector<int32_t> next_;
  std::vector<int32_t> previous_;
  std::vector<uint64_t> queue_;
};

/// Encodes words. Immutable: threads may use one at the same time, each with a state of its own.
class BpeModel {
 public:
  /// Reads the "model" of a file; throws ValueError if it contradicts itself. `takes_bytes`: words are bytes, and the
  /// vocabulary has their visible characters (byte_character()).
  BpeModel(const JsonView& json, bool takes_bytes);

  /// Appends the ids of a word, which is not empty.
  void encode(std::string_view word, BpeState& state, std::vector<int32_t>& ids) const;

  std::optional<int32_t> token_to_id(std::string_view token) const;
  /// Returns tokens by id.
  const std::unordered_map<int32_t, std::string_view>& tokens() const { return tokens_; }

 private:
  using Merge = MergeTable::Merge;

  void read_vocabulary(const JsonView& vocabulary);
  void read_merges(const JsonView& merges);
  void read_characters();

  void encode_cached(std::string_view word, BpeState& state, std::vector<int32_t>& ids) const;
  void encode_new(std::string_view word, BpeState& state) const;
  void split_into_symbols(std::string_view word, std::vector<int32_t>& symbols) const;
  void append_unlisted(const std::string& character, bool& owes_unknown, std::vector<int32_t>& symbols) const;
  void join_short(BpeState& state) const;
  void join_long(BpeState& state) const;
  int32_t unknown_id() const;

  static size_t may_join_index(char32_t left, char32_t right) {
    return (static_cast<uint64_t>(left) << 32 | right) * 0x9E3779B97F4A7C15 >> 44;
  }

  int32_t character_id(char32_t character) const {
    return character < character_ids_.size() ? character_ids_[character] : -1;
  }

  std::string path_;
  bool takes_bytes_;
  bool ignores_merges_ = false;
  bool fuses_unknown_ = false;
  bool falls_back_to_bytes_ = false;
  std::optional<std::string> unknown_token_;
  size_t longest_token_ = 0;
  std::unordered_map<std::string, int32_t> ids_;
  std::unordered_map<int32_t, std::string_view> tokens_;
  MergeTable merges_{0};
  // Has the ids of bytes if the model takes them, else of characters; -1 where the vocabulary has none.
  std::vector<int32_t> character_ids_;
  // Says, by may_join_index() of two characters, whether a merge may have them where its halves meet, or others of the
  // same index. Words of characters are cut where none has.
  std::vector<bool> may_join_;
};

}  // namespace tessera::text
