#pragma once
// Byte-pair encoding: joins pairs of a word's characters or bytes, in the order in which the vocabulary learned them.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/json_view.h"

namespace tessera::text {

/// Maps pairs of ids to their merges. Uses open addressing, so a lookup usually reads one cache line.
class MergeTable {
 public:
  struct Merge {
    /// Position in the order of learned pairs; lower ranks join first.
    uint32_t rank = kNone;
    int32_t id = 0;
  };
  static constexpr uint32_t kNone = ~uint32_t{0};

  /// Makes an empty table with room for this number of pairs.
  explicit MergeTable(size_t pairs);

  /// Inserts a pair, or replaces its value.
  void insert(int32_t left, int32_t right, Merge merge) { slot(key(left, right)) = {key(left, right), merge}; }

  /// Returns the merge of a pair, with rank kNone if it does not join.
  Merge find(int32_t left, int32_t right) const { return const_cast<MergeTable*>(this)->slot(key(left, right)).merge; }

 private:
  struct Slot {
    uint64_t key = ~uint64_t{0};
    Merge merge;
  };

  static uint64_t key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }

  /// Returns the pair's slot, or the empty slot where it would be inserted.
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

/// Working memory of one thread for encoding, with a bounded cache of words' ids.
class BpeState {
 public:
  BpeState();

 private:
  friend class BpeModel;

  static constexpr size_t kMaxBytes = 30;
  static constexpr size_t kMaxIds = 8;
  static constexpr size_t kSlots = size_t{1} << 16;  // 4 MiB

  /// Cached word, in one cache line. Each word has one possible slot and replaces the previous word there.
  struct alignas(64) Slot {
    uint8_t bytes = 0;
    uint8_t ids = 0;
    char word[kMaxBytes];
    int32_t id[kMaxIds];
  };

  std::vector<Slot> slots_;
  // State of the current word. It has its symbols, the merge of each with the next, and a linked list that skips joined
  // ones.
  std::vector<int32_t> symbols_;
  std::vector<MergeTable::Merge> merges_;
  std::vector<int32_t> next_;
  std::vector<int32_t> previous_;
  std::vector<uint64_t> queue_;
};

/// Encodes words. Immutable; threads may share it, each with its own BpeState.
class BpeModel {
 public:
  /// Reads the "model" of a file. Throws ValueError if it is inconsistent. With `takes_bytes`, words are bytes, and the
  /// vocabulary contains their visible characters (byte_character()).
  BpeModel(const JsonView& json, bool takes_bytes);

  /// Appends the ids of a nonempty word.
  void encode(std::string_view word, BpeState& state, std::vector<int32_t>& ids) const;

  std::optional<int32_t> token_to_id(std::string_view token) const;
  /// Returns the tokens by id.
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
  // Ids of bytes if takes_bytes_, otherwise of characters; -1 if the vocabulary has none.
  std::vector<int32_t> character_ids_;
  // Indexed by may_join_index(): whether a merge may join these two characters (or others with the same index) at its
  // boundary. Character words are split where no merge can.
  std::vector<bool> may_join_;
};

}  // namespace tessera::text
