#pragma once
// Keys of config.json for rotary positions, in both styles: rope_parameters of transformers 5, and rope_theta with
// rope_scaling of 4. Internal to this package. Pure functions; thread-safe.

#include "models/config_reader.h"
#include "models/decoder_config.h"
#include "models/decoder_families.h"

namespace tessera::models {

/// Sets config.rotary and config.local_rotary. config.max_position_embeddings provides a default.
void read_rotaries(DecoderConfig& config, KeyReader& reader, const Family& family);

/// Writes the keys of transformers 4, which 5 reads too, unless only those of 5 can express the config.
void put_rotaries(Json& out, const DecoderConfig& config);

}  // namespace tessera::models
