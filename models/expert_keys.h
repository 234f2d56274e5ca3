#pragma once
// Keys of config.json for a mixture of experts. Internal to this package. Pure functions; thread-safe.

#include "models/config_reader.h"
#include "models/decoder_config.h"
#include "models/decoder_families.h"

namespace tessera::models {

/// Sets config.moe if the family has experts. Requires the other sizes of `config`.
void read_experts(DecoderConfig& config, KeyReader& reader, const Family& family);

void put_experts(Json& out, const DecoderConfig& config, const Family& family);

/// Throws ValueError like check_config.
void check_experts(const MoeConfig& moe, int64_t layers);

}  // namespace tessera::models
