#include "models/rotary_keys.h"

namespace tessera::models {

namespace {

const Names<RotaryConfig::Type> kRotaryTypes = {{"default", RotaryConfig::Type::Default},
                                                {"linear", RotaryConfig::Type::Linear},
                                                {"dynamic", RotaryConfig::Type::Dynamic},
                                                {"llama3", RotaryConfig::Type::Llama3},
                                                {"yarn", RotaryConfig::Type::Yarn}};

/// Reads the factor, which is in the object or, in older files, next to it. `given` is the family's default, or the
/// value next to the object.
double read_partial_factor(KeyReader& reader, std::optional<double> given) {
  if (!given) {
    if (const Json* part = reader.find("partial_rotary_factor"); part && *part != Json(1)) {
      reader.fail("partial_rotary_factor", "1: heads of this family are rotated whole");
    }
    return 1;
  }
  const double factor = reader.find_number("partial_rotary_factor").value_or(*given);
  if (factor <= 0 || factor > 1) {
    reader.fail("partial_rotary_factor", "above 0 and at most 1");
  }
  return factor;
}

/// Reads rope_parameters, or rope_scaling, with the defaults next to it.
RotaryConfig read_rotary(const Json* object, const KeyReader& whole, std::string_view key, double theta,
                         int64_t max_positions, std::optional<double> partial_factor) {
  RotaryConfig rotary{
      .theta = theta, .partial_rotary_factor = partial_factor.value_or(1), .original_max_position_embeddings = 0};
  if (!object) {
    return rotary;
  }
  if (!object->is_object()) {
    whole.fail(key, "an object, or null");
  }
  KeyReader reader(*object, fmt::format("{}{}.", whole.place(), key));
  rotary.theta = reader.find_number("rope_theta").value_or(theta);
  const bool has_type = reader.find("rope_type") != nullptr;
  reader.find("type");  // the old name
  rotary.type = reader.named(has_type ? "rope_type" : "type", kRotaryTypes, std::optional(RotaryConfig::Type::Default));
  rotary.partial_rotary_factor = read_partial_factor(reader, partial_factor);
  const bool is_yarn = rotary.type == RotaryConfig::Type::Yarn, is_llama3 = rotary.type == RotaryConfig::Type::Llama3;
  if (is_yarn || is_llama3) {
    rotary.original_max_position_embeddings =
        reader.find_integer("original_max_position_embeddings").value_or(max_positions);
  }
  if (is_yarn && reader.has("factor") && !reader.find("factor")) {  // null: determined by the lengths
    rotary.factor = static_cast<double>(max_positions) / static_cast<double>(rotary.original_max_position_embeddings);
  } else if (rotary.type != RotaryConfig::Type::Default) {
    rotary.factor = reader.number("factor");
  }
  if (is_llama3) {
    rotary.low_freq_factor = reader.number("low_freq_factor");
    rotary.high_freq_factor = reader.number("high_freq_factor");
    if (rotary.high_freq_factor == rotary.low_freq_factor) {
      reader.fail("high_freq_factor", "another number than low_freq_factor");
    }
  }
  if (is_yarn) {
    rotary.attention_factor = reader.find_number("attention_factor");
    rotary.beta_fast = reader.find_number("beta_fast").value_or(32);
    rotary.beta_slow = reader.find_number("beta_slow").value_or(1);
    rotary.mscale = reader.find_number("mscale").value_or(0);
    rotary.mscale_all_dim = reader.find_number("mscale_all_dim").value_or(0);
    rotary.truncate = reader.boolean("truncate", true);
  }
  reader.check_all_read(
      fmt::format("Remove them, or name another rope_type than \"{}\"", name_of(kRotaryTypes, rotary.type)));
  return rotary;
}

Json format_rotary(const RotaryConfig& rotary) {
  Json out = {{"rope_type", name_of(kRotaryTypes, rotary.type)}};
  if (rotary.type != RotaryConfig::Type::Default) {
    out["factor"] = rotary.factor;
  }
  if (rotary.original_max_position_embeddings > 0) {
    out["original_max_position_embeddings"] = rotary.original_max_position_embeddings;
  }
  if (rotary.type == RotaryConfig::Type::Llama3) {
    out["low_freq_factor"] = rotary.low_freq_factor;
    out["high_freq_factor"] = rotary.high_freq_factor;
  }
  if (rotary.type == RotaryConfig::Type::Yarn) {
    out.update({{"beta_fast", rotary.beta_fast}, {"beta_slow", rotary.beta_slow}, {"truncate", rotary.truncate}});
    if (rotary.attention_factor) {
      out["attention_factor"] = *rotary.attention_factor;
    }
    if (rotary.mscale > 0) {
      out["mscale"] = rotary.mscale;
    }
    if (rotary.mscale_all_dim > 0) {
      out["mscale_all_dim"] = rotary.mscale_all_dim;
    }
  }
  return out;
}

}  // namespace

void read_rotaries(DecoderConfig& config, KeyReader& reader, const Family& family) {
  const Json* const parameters = reader.find("rope_parameters");
  const Json* const scaling = reader.find("rope_scaling");
  if (parameters && scaling) {
    reader.fail("rope_scaling", "left out, or null, beside rope_parameters");
  }
  const double theta = reader.find_number("rope_theta").value_or(family.rope_theta);
  auto partial_factor = family.partial_rotary_factor;
  const double factor_beside = read_partial_factor(reader, partial_factor);
  if (partial_factor) {
    partial_factor = factor_beside;
  }
  const auto read = [&](const Json* object, std::string_view key, double own_theta) {
    return read_rotary(object, reader, key, own_theta, config.max_position_embeddings, partial_factor);
  };
  if (!family.has_local_rotary) {
    config.rotary = parameters ? read(parameters, "rope_parameters", theta) : read(scaling, "rope_scaling", theta);
    return;
  }
  const double local_theta = reader.find_number("rope_local_base_freq").value_or(1e4);
  if (!parameters) {
    config.rotary = read(scaling, "rope_scaling", theta);
    config.local_rotary = RotaryConfig{.theta = local_theta};
    return;
  }
  if (!parameters->is_object()) {
    reader.fail("rope_parameters", "an object, or null");
  }
  KeyReader by_type(*parameters, reader.place() + "rope_parameters.");
  config.rotary = read(by_type.find("full_attention"), "rope_parameters.full_attention", theta);
  config.local_rotary = read(by_type.find("sliding_attention"), "rope_parameters.sliding_attention", local_theta);
  by_type.check_all_read("Allowed are full_attention and sliding_attention");
  for (const auto* rotary : {&*config.rotary, &*config.local_rotary}) {
    TESSERA_CHECK(ValueError, rotary->truncate,
                  "{}rope_parameters has truncate = false by layer type, which transformers does not read there; it "
                  "must be true",
                  reader.place());
  }
}

void put_rotaries(Json& out, const DecoderConfig& config) {
  const bool is_plain = config.rotary->type == RotaryConfig::Type::Default;
  if (config.local_rotary && config.local_rotary->type != RotaryConfig::Type::Default) {
    const auto with_theta = [](const RotaryConfig& rotary) {
      Json object = format_rotary(rotary);
      object["rope_theta"] = rotary.theta;
      return object;
    };
    out["rope_parameters"] = {{"full_attention", with_theta(*config.rotary)},
                              {"sliding_attention", with_theta(*config.local_rotary)}};
    return;
  }
  out["rope_theta"] = config.rotary->theta;
  if (find_family(config.model_type)->partial_rotary_factor) {
    out["partial_rotary_factor"] = config.rotary->partial_rotary_factor;
  }
  out["rope_scaling"] = is_plain ? Json() : format_rotary(*config.rotary);
  if (config.local_rotary) {
    out["rope_local_base_freq"] = config.local_rotary->theta;
  }
}

}  // namespace tessera::models
