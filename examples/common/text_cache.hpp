// The cache of one text: etkv's, or a cache in a program's graph.
#pragma once

#include <cstdint>

#include "etkv/etkv.hpp"
#include "examples/common/program.hpp"

namespace etkv::examples {

class TextCache {
 public:
  /// Borrows a cache of etkv.
  TextCache(Cache& cache) : cache_(&cache) {}

  /// Borrows a loaded program that keeps its cache in its graph. Uses at most
  /// `capacity` positions of that cache.
  TextCache(Program& program, int32_t capacity)
      : program_(&program), capacity_(capacity) {}

  /// Returns etkv's cache; nullptr for a cache in a graph.
  Cache* of_session() const {
    return cache_;
  }

  int32_t capacity() const;
  Result<int32_t> length() const;

  /// Returns whether another position fits.
  Result<bool> can_extend() const;

  /// Removes the positions at or after `length`, and earlier positions that
  /// must run again. A cache with windows or recurrent layers can be rewound
  /// only to its last positions and to checkpoints. A cache in a graph can be
  /// rewound only to 0. Returns the remaining length.
  Result<int32_t> rewind(int32_t length);

  /// Marks where the prompt of a turn will end; see etkv_cache_mark_turn.
  Result<void> mark_turn(int32_t end);

  /// Removes everything, even from a poisoned cache.
  Result<void> clear();

 private:
  Cache* cache_ = nullptr;
  Program* program_ = nullptr;
  int32_t capacity_ = 0;
};

} // namespace etkv::examples
