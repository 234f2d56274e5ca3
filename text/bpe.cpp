#define XXH_INLINE_ALL
#include "text/bpe.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

#include "base/error.h"
#include "text/unicode.h"

namespace tessera::text {

namespace {

/// Longest word for which searching all pairs for the next join is faster than a queue.
constexpr size_t kShortWord = 48;

struct MergedPair {
  std::string left;
  std::string right;
};

/// Reads "left right" or ["left", "right"].
MergedPair read_pair(const JsonView& merge) {
  if (merge.value().is_array()) {
    const auto& parts = merge.as_array();
    TESSERA_CHECK(ValueError, parts.size() == 2 && parts[0].is_string() && parts[1].is_string(),
                  "{}: is {}, must be two tokens", merge.path(), shown(merge.value()));
    return {parts[0].get<std::string>(), parts[1].get<std::string>()};
  }
  const auto& text = merge.as_string();
  const size_t space = text.find(' ');
  TESSERA_CHECK(ValueError, space != std::string::npos && text.find(' ', space + 1) == std::string::npos,
                "{}: is {}, must be two tokens with a space between them", merge.path(), shown(merge.value()));
  return {text.substr(0, space), text.substr(space + 1)};
}

bool is_one_character(std::string_view token) {
  return !token.empty() && utf8_length(token[0]) == token.size();
}

}  // namespace

MergeTable::MergeTable(size_t pairs)
    : slots_(std::bit_ceil(2 * pairs + 2)), shift_(64 - std::countr_zero(slots_.size())) {}

BpeState::BpeState() : slots_(kSlots) {}

BpeModel::BpeModel(const JsonView& json, bool takes_bytes) : path_(json.path()), takes_bytes_(takes_bytes) {
  if (json.at("type").as_string() != "BPE") {
    refuse_type(json, "BPE");
  }
  TESSERA_CHECK(NotImplementedError, !json.has("dropout") || json.at("dropout").value() == 0.0,
                "{}.dropout: is {}, must be null or 0: random tokens are not supported", path_,
                shown(json.at("dropout").value()));
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    TESSERA_CHECK(NotImplementedError, !json.has(key) || json.at(key).as_string().empty(),
                  "{}.{}: is {}, must be null or \"\": others are not supported", path_, key,
                  shown(json.at(key).value()));
  }
  ignores_merges_ = json.bool_or("ignore_merges", false);
  fuses_unknown_ = json.bool_or("fuse_unk", false);
  falls_back_to_bytes_ = json.bool_or("byte_fallback", false);
  if (json.has("unk_token")) {
    unknown_token_ = json.at("unk_token").as_string();
  }
  read_vocabulary(json.at("vocab"));
  read_characters();
  read_merges(json.at("merges"));
}

void BpeModel::read_vocabulary(const JsonView& vocabulary) {
  const auto& members = vocabulary.as_object();
  ids_.reserve(members.size());
  tokens_.reserve(members.size());
  for (const auto& [token, value] : members) {
    // Building the path costs more than the rest, and only an error needs it.
    const bool is_id = value.is_number_unsigned() && value.get<uint64_t>() <= INT32_MAX;
    const int32_t id = is_id ? value.get<int32_t>() : JsonView(value, vocabulary.path() + "." + token).as_id();
    const auto place = ids_.emplace(token, id).first;
    const auto [other, is_new] = tokens_.emplace(id, place->first);
    TESSERA_CHECK(ValueError, is_new, "{}: \"{}\" and \"{}\" both have id {}, which one may have", vocabulary.path(),
                  other->second, token, id);
    longest_token_ = std::max(longest_token_, token.size());
  }
}

void BpeModel::read_characters() {
  if (takes_bytes_) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string character;
      append_utf8(character, byte_character(static_cast<unsigned char>(byte)));
      character_ids_.push_back(token_to_id(character).value_or(-1));
    }
    return;
  }
  for (const auto& [token, id] : ids_) {
    if (is_one_character(token)) {
      const char32_t character = decode_utf8(token.data());
      if (character >= character_ids_.size()) {
        character_ids_.resize(character + 1, -1);
      }
      character_ids_[character] = id;
    }
  }
  may_join_.resize(size_t{1} << 20);
}

void BpeModel::read_merges(const JsonView& merges) {
  const auto& list = merges.as_array();
  merges_ = MergeTable(list.size());
  uint32_t rank = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    const auto view = [&] { return JsonView(list[i], fmt::format("{}[{}]", merges.path(), i)); };
    if (list[i].is_string() && list[i].get_ref<const std::string&>().starts_with("#version")) {
      continue;
    }
    const auto [left, right] = read_pair(view());
    const auto id = [&](const std::string& token) {
      const auto found = ids_.find(token);
      TESSERA_CHECK(ValueError, found != ids_.end(), "{}: \"{}\" is not in {}.vocab, where it must be", view().path(),
                    token, path_);
      return found->second;
    };
    const int32_t left_id = id(left), right_id = id(right);
    merges_.insert(left_id, right_id, {rank++, id(left + right)});
    if (!takes_bytes_ && !left.empty() && !right.empty()) {
      may_join_[may_join_index(decode_utf8(left.data() + last_character(left)), decode_utf8(right.data()))] = true;
    }
  }
}

std::optional<int32_t> BpeModel::token_to_id(std::string_view token) const {
  const auto found = ids_.find(std::string(token));
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

int32_t BpeModel::unknown_id() const {
  const auto id = token_to_id(*unknown_token_);
  TESSERA_CHECK(ValueError, id, "{}.unk_token: \"{}\" is not in {}.vocab, and the text has what needs it", path_,
                *unknown_token_, path_);
  return *id;
}

void BpeModel::encode(std::string_view word, BpeState& state, std::vector<int32_t>& ids) const {
  if (takes_bytes_) {
    return encode_cached(word, state, ids);
  }
  if (ignores_merges_ && word.size() <= longest_token_) {
    if (const auto id = token_to_id(word)) {
      return ids.push_back(*id);
    }
  }
  // Splits the word where no merge crosses, which is equivalent and faster. Next to a character that the vocabulary
  // lacks, other tokens may meet.
  size_t start = 0;
  char32_t previous = 0;
  bool previous_is_listed = false;
  for_each_character(word, [&](char32_t character, size_t offset, size_t) {
    const bool is_listed = character_id(character) >= 0;
    if (is_listed && previous_is_listed && !may_join_[may_join_index(previous, character)]) {
      encode_cached(word.substr(start, offset - start), state, ids);
      start = offset;
    }
    previous = character;
    previous_is_listed = is_listed;
  });
  encode_cached(word.substr(start), state, ids);
}

void BpeModel::encode_cached(std::string_view word, BpeState& state, std::vector<int32_t>& ids) const {
  if (word.size() > BpeState::kMaxBytes) {
    encode_new(word, state);
    ids.insert(ids.end(), state.symbols_.begin(), state.symbols_.end());
    return;
  }
  auto& slot = state.slots_[XXH3_64bits(word.data(), word.size()) % BpeState::kSlots];
  if (slot.bytes == word.size() && std::memcmp(slot.word, word.data(), word.size()) == 0) {
    ids.insert(ids.end(), slot.id, slot.id + slot.ids);
    return;
  }
  encode_new(word, state);
  const auto& made = state.symbols_;
  ids.insert(ids.end(), made.begin(), made.end());
  if (made.size() <= BpeState::kMaxIds) {
    slot.bytes = static_cast<uint8_t>(word.size());
    slot.ids = static_cast<uint8_t>(made.size());
    std::copy(word.begin(), word.end(), slot.word);
    std::copy(made.begin(), made.end(), slot.id);
  }
}

/// Encodes a word that is not cached. Leaves the ids in state.symbols_.
void BpeModel::encode_new(std::string_view word, BpeState& state) const {
  state.symbols_.clear();
  if (takes_bytes_ && ignores_merges_ && word.size() <= longest_token_) {
    std::string visible;
    append_byte_characters(visible, word);
    if (const auto id = token_to_id(visible)) {
      return state.symbols_.push_back(*id);
    }
  }
  split_into_symbols(word, state.symbols_);
  if (state.symbols_.size() < 2) {
    return;
  }
  state.symbols_.size() <= kShortWord ? join_short(state) : join_long(state);
}

void BpeModel::split_into_symbols(std::string_view word, std::vector<int32_t>& symbols) const {
  // An unknown token is appended when the next known one is, as in Python, so byte tokens may precede it.
  bool owes_unknown = false;
  const auto pay = [&] {
    if (owes_unknown) {
      symbols.push_back(unknown_id());
      owes_unknown = false;
    }
  };
  const auto add = [&](char32_t code, auto text_of) {
    const int32_t id = character_id(code);
    if (id >= 0) {
      pay();
      symbols.push_back(id);
    } else {
      append_unlisted(text_of(), owes_unknown, symbols);
    }
  };
  if (takes_bytes_) {
    for (const char c : word) {
      const auto byte = static_cast<unsigned char>(c);
      add(byte, [&] {
        std::string visible;
        append_utf8(visible, byte_character(byte));
        return visible;
      });
    }
  } else {
    for_each_character(word, [&](char32_t character, size_t offset, size_t bytes) {
      add(character, [&] { return std::string(word.substr(offset, bytes)); });
    });
  }
  pay();
}

/// Appends the symbols for a character that is not in the vocabulary.
void BpeModel::append_unlisted(const std::string& character, bool& owes_unknown, std::vector<int32_t>& symbols) const {
  if (falls_back_to_bytes_) {
    std::vector<int32_t> bytes;
    for (const char byte : character) {
      if (const auto id = token_to_id(fmt::format("<0x{:02X}>", static_cast<unsigned char>(byte)))) {
        bytes.push_back(*id);
      }
    }
    if (bytes.size() == character.size()) {
      symbols.insert(symbols.end(), bytes.begin(), bytes.end());
      return;
    }
  }
  if (!unknown_token_) {
    return;
  }
  if (owes_unknown && !fuses_unknown_) {
    symbols.push_back(unknown_id());
  }
  owes_unknown = true;
}

void BpeModel::join_short(BpeState& state) const {
  auto& symbols = state.symbols_;
  auto& merges = state.merges_;
  merges.clear();
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    merges.push_back(merges_.find(symbols[i], symbols[i + 1]));
  }
  while (!merges.empty()) {
    const auto best =
        std::min_element(merges.begin(), merges.end(), [](const Merge& a, const Merge& b) { return a.rank < b.rank; });
    if (best->rank == MergeTable::kNone) {
      break;
    }
    const auto i = static_cast<size_t>(best - merges.begin());
    symbols[i] = best->id;
    symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(i) + 1);
    merges.erase(best);
    if (i > 0) {
      merges[i - 1] = merges_.find(symbols[i - 1], symbols[i]);
    }
    if (i < merges.size()) {
      merges[i] = merges_.find(symbols[i], symbols[i + 1]);
    }
  }
}

// The queue has rank and position of pairs, lowest first. A pair that has changed since then has another rank.
void BpeModel::join_long(BpeState& state) const {
  constexpr int32_t kGone = -1;
  auto& symbols = state.symbols_;
  auto& next = state.next_;
  auto& previous = state.previous_;
  auto& queue = state.queue_;
  const auto count = static_cast<int32_t>(symbols.size());
  next.resize(symbols.size());
  previous.resize(symbols.size());
  queue.clear();
  const auto offer = [&](int32_t i, bool is_heap) {
    const auto merge = merges_.find(symbols[i], symbols[next[i]]);
    if (merge.rank != MergeTable::kNone) {
      queue.push_back(static_cast<uint64_t>(merge.rank) << 32 | static_cast<uint32_t>(i));
      if (is_heap) {
        std::push_heap(queue.begin(), queue.end(), std::greater<>());
      }
    }
  };
  for (int32_t i = 0; i < count; ++i) {
    previous[i] = i - 1;
    next[i] = i + 1;
    if (i + 1 < count) {
      offer(i, false);
    }
  }
  std::make_heap(queue.begin(), queue.end(), std::greater<>());
  while (!queue.empty()) {
    const auto rank = static_cast<uint32_t>(queue.front() >> 32);
    const auto i = static_cast<int32_t>(queue.front() & 0xFFFFFFFF);
    std::pop_heap(queue.begin(), queue.end(), std::greater<>());
    queue.pop_back();
    if (symbols[i] == kGone || next[i] == count) {
      continue;
    }
    const auto merge = merges_.find(symbols[i], symbols[next[i]]);
    if (merge.rank != rank) {
      continue;
    }
    symbols[i] = merge.id;
    symbols[next[i]] = kGone;
    next[i] = next[next[i]];
    if (next[i] < count) {
      previous[next[i]] = i;
      offer(i, true);
    }
    if (previous[i] >= 0) {
      offer(previous[i], true);
    }
  }
  std::erase(symbols, kGone);
}

}  // namespace tessera::text
