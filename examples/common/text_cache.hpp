// The cache of one text: etkv's, or the one that a program keeps in its graph.
#pragma once

#include <cstdint>

#include "etkv/etkv.hpp"
#include "examples/common/program.hpp"

namespace etkv::examples {

class TextCache {
 public:
  /// Borrows a cache of etkv's.
  TextCache(Cache& cache) : cache_(&cache) {}

  /// Borrows a loaded program that keeps its cache in its graph, and uses up to
  /// `capacity` positions of it.
  TextCache(Program& program, int32_t capacity)
      : program_(&program), capacity_(capacity) {}

  /// Returns etkv's cache; nullptr for one in a graph.
  Cache* of_session() const {
    return cache_;
  }

  int32_t capacity() const;
  Result<int32_t> length() const;

  /// Returns whether another position fits.
  Result<bool> can_extend() const;

  /// Removes the positions from `length` on, and those before it that must run
  /// again: layers with windows and recurrent layers keep the last positions and
  /// checkpoints, and a cache in a graph keeps none. Returns how many are left.
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
