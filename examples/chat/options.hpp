// The options of etkv_chat.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "etkv/etkv.hpp"
#include "examples/common/model.hpp"
#include "examples/speculation/speculator.hpp"

namespace etkv::examples {

struct Options {
  ModelOptions model;
  /// The question; empty for a conversation at the terminal.
  std::optional<std::string> prompt;
  std::optional<std::string> system;
  int64_t max_tokens = 256;
  Sampling sampling;
  SpeculationOptions speculation;
  /// The kind of cache; empty for "contiguous", or "tree" with a draft.
  std::optional<std::string> session;
  /// The folder of stored texts; nothing is stored without one.
  std::optional<std::string> prefix_store;
  /// The maximum bytes of the store's files.
  uint64_t prefix_store_bytes = 0;
  /// The maximum bytes of all caches; 0 for no limit.
  uint64_t memory_budget_bytes = 0;
  bool ids = false;
  bool help = false;
  bool version = false;
};

Result<Options> parse_options(int argc, const char* const* argv);

/// Refuses options of a session. Called for a program with a cache in its
/// graph.
Result<void> require_no_session(const Options& options);

std::string help_text();

} // namespace etkv::examples
